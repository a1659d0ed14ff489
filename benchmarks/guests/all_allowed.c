// A controller with the native ABI that only returns a mask, which allows all tokens.
typedef unsigned u32;

static u32 block[16], inbox[1024], mask[8192];

#define EXPORT(name) __attribute__((export_name(#name))) int name

EXPORT(tokenbus_abi_v1)(void) {
    block[0] = 1;
    block[1] = (u32)inbox;
    block[2] = sizeof inbox;
    for (int i = 0; i < 8192; i++) mask[i] = ~0u;
    return (int)block;
}
EXPORT(tokenbus_grow)(int bytes) { return 0; }
EXPORT(tokenbus_init_prompt)(void) { return 1; }
EXPORT(tokenbus_pre_process)(void) { return 1; }
EXPORT(tokenbus_mid_process)(void) {
    block[11] = (u32)mask;
    return 1;
}
EXPORT(tokenbus_post_process)(void) { return 1; }
