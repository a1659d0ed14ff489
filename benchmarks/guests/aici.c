// A controller with AICI's binary interface. It reads the argument of each call, and returns a mask that allows all
// tokens.
typedef unsigned u32;
#define IMPORT(name) __attribute__((import_module("env"), import_name(#name)))
#define EXPORT(name) __attribute__((export_name(#name)))

IMPORT(aici_host_process_arg) u32 aici_host_process_arg(void);
IMPORT(aici_host_read_blob) u32 aici_host_read_blob(u32 blob, void *into, u32 size);
IMPORT(aici_host_return_process_result) void aici_host_return_process_result(const void *, u32);
IMPORT(aici_host_return_logit_bias) void aici_host_return_logit_bias(const u32 *mask);

static u32 mask[8192];
static char argument[1 << 16];

static void answer(const char *json, u32 size) {
    aici_host_read_blob(aici_host_process_arg(), argument, sizeof argument);
    aici_host_return_process_result(json, size);
}
#define ANSWER(json) answer(json, sizeof(json) - 1)

EXPORT(aici_init) void aici_init(void) {
    for (int i = 0; i < 8192; i++) mask[i] = ~0u;
}
EXPORT(aici_create) int aici_create(void) { return 1; }
EXPORT(aici_init_prompt) void aici_init_prompt(int self) { ANSWER("{}"); }
EXPORT(aici_pre_process) void aici_pre_process(int self) {
    ANSWER("{\"attention_masks\":[[]],\"suspend\":false,\"ff_tokens\":[]}");
}
EXPORT(aici_mid_process) void aici_mid_process(int self) {
    aici_host_return_logit_bias(mask);
    ANSWER("{\"SampleWithBias\":{}}");
}
EXPORT(aici_post_process) void aici_post_process(int self) { ANSWER("{\"stop\":false}"); }
EXPORT(aici_panic) void aici_panic(void) {}
