// A controller of the native ABI whose bias has a value for each of 131,072 tokens, and which does nothing else.
typedef unsigned u32;

static u32 block[16], inbox[1024], bias[131072];

#define EXPORT(name) __attribute__((export_name(#name))) int name

EXPORT(tokenbus_abi_v1)(void) {
    block[0] = 1;
    block[1] = (u32)inbox;
    block[2] = sizeof inbox;
    for (u32 i = 0; i < 131072; i++) bias[i] = 0x3f800000;
    return (int)block;
}
EXPORT(tokenbus_grow)(int bytes) { return 0; }
EXPORT(tokenbus_init_prompt)(void) { return 1; }
EXPORT(tokenbus_pre_process)(void) { return 1; }
EXPORT(tokenbus_mid_process)(void) {
    block[14] = (u32)bias;
    block[15] = 0;
    return 1;
}
EXPORT(tokenbus_post_process)(void) { return 1; }
