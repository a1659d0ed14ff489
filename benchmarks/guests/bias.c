// A controller with the native ABI that only returns a bias. The bias has values for NUM_PAIRS tokens; if NUM_PAIRS
// is 0, for all 131,072 tokens.
typedef unsigned u32;

#define VOCAB 131072
#ifndef NUM_PAIRS
#error "NUM_PAIRS is not defined; compile with -DNUM_PAIRS=…"
#endif

static u32 block[16], inbox[1024], bias[NUM_PAIRS ? 2 * NUM_PAIRS : VOCAB];

#define EXPORT(name) __attribute__((export_name(#name))) int name

EXPORT(tokenbus_abi_v1)(void) {
    block[0] = 1;
    block[1] = (u32)inbox;
    block[2] = sizeof inbox;
    if (NUM_PAIRS)
        for (u32 i = 0; i < NUM_PAIRS; i++) bias[2 * i] = 7 * i, bias[2 * i + 1] = 0x3f800000;
    else
        for (u32 i = 0; i < VOCAB; i++) bias[i] = 0x3f800000;
    return (int)block;
}
EXPORT(tokenbus_grow)(int bytes) { return 0; }
EXPORT(tokenbus_init_prompt)(void) { return 1; }
EXPORT(tokenbus_pre_process)(void) { return 1; }
EXPORT(tokenbus_mid_process)(void) {
    block[14] = (u32)bias;
    block[15] = NUM_PAIRS;
    return 1;
}
EXPORT(tokenbus_post_process)(void) { return 1; }
