// A controller with the native ABI whose calls do nothing. It has written to 1 MiB of its memory.
typedef unsigned u32;

static u32 block[16], inbox[1024];
static unsigned char memory[1 << 20];

#define EXPORT(name) __attribute__((export_name(#name))) int name

EXPORT(tokenbus_abi_v1)(void) {
    block[0] = 1;
    block[1] = (u32)inbox;
    block[2] = sizeof inbox;
    return (int)block;
}
EXPORT(tokenbus_grow)(int bytes) { return 0; }
EXPORT(tokenbus_init_prompt)(void) {
    for (u32 i = 0; i < sizeof memory; i += 64) memory[i] = (unsigned char)(i >> 6 | 1);
    return 1;
}
EXPORT(tokenbus_pre_process)(void) { return 1; }
EXPORT(tokenbus_mid_process)(void) { return 1; }
EXPORT(tokenbus_post_process)(void) { return 1; }
