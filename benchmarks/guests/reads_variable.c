// A controller with the native ABI. Calls of pre_process alternately write and read a variable.
typedef unsigned u32;

__attribute__((import_module("tokenbus"), import_name("var_set"))) int var_set(
    const char *name, u32 name_len, const void *value, u32 len, int when, u32 *version);
__attribute__((import_module("tokenbus"), import_name("var_get"))) int var_get(
    const char *name, u32 name_len, void *into, u32 most, u32 *version);

static u32 block[16], inbox[1024];
static char value[16];
static int writes;

#define EXPORT(name) __attribute__((export_name(#name))) int name

EXPORT(tokenbus_abi_v1)(void) {
    block[0] = 1;
    block[1] = (u32)inbox;
    block[2] = sizeof inbox;
    return (int)block;
}
EXPORT(tokenbus_grow)(int bytes) { return 0; }
EXPORT(tokenbus_init_prompt)(void) { return 1; }
EXPORT(tokenbus_pre_process)(void) {
    writes = !writes;
    if (writes)
        var_set("x", 1, value, sizeof value, -1, 0);
    else
        var_get("x", 1, value, sizeof value, 0);
    return 1;
}
EXPORT(tokenbus_mid_process)(void) { return 1; }
EXPORT(tokenbus_post_process)(void) { return 1; }
