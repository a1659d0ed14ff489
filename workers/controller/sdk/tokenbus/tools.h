// Calls of tools, which are functions that tool workers serve.
//
//     static tb_tool_call call;
//
//     tb_answer tb_pre_process(void) {
//         if (!call.len) call = tb_call("add", "{\"a\": 2}", 8);
//         tb_bytes answer = {0};
//         if (!tb_call_answer(&call, &answer)) return tb_suspend();
//         ...
#ifndef TOKENBUS_TOOLS_H
#define TOKENBUS_TOOLS_H

TB_IMPORT("tool_call")
uint32_t tb_host_tool_call(const char *tool, uint32_t tool_len, const void *arguments, uint32_t n,
                           char *record, uint32_t most);

enum { TB_RECORD_BYTES = 64 };

// A call of a tool. `record` is the name of the variable that will have the tool's answer. `len` is
// the length of this name; 0 before the call.
typedef struct tb_tool_call {
    char record[TB_RECORD_BYTES];
    uint32_t len;
} tb_tool_call;

// Calls a tool. `arguments` is a JSON object of at most 65,536 bytes. The tool runs at most once,
// even if this controller continues on another worker.
static inline tb_tool_call tb_call(const char *tool, const void *arguments, uint32_t n) {
    tb_tool_call call = {{0}, 0};
    call.len = tb_host_tool_call(tool, strlen(tool), arguments, n, call.record, TB_RECORD_BYTES - 1);
    if (call.len >= TB_RECORD_BYTES) tb_fail("the record of a call has %u bytes", call.len);
    return call;
}

// Whether a tool has answered. If so, `answer` is {"value": …} or {"error": …, "code": …}. If not,
// return tb_suspend from tb_pre_process, which is called again when the answer arrives.
static inline bool tb_call_answer(const tb_tool_call *call, tb_bytes *answer) {
    if (!tb_var_get(call->record, answer, 0)) tb_fail("a tool that was not called has no answer");
    if (answer->len && answer->data[0]) return true;
    tb_bytes_cut(answer, 0);
    return false;
}

// Whether the answer of a tool is an error.
static inline bool tb_call_failed(const tb_bytes *answer) {
    return answer->len >= 8 && !memcmp(answer->data, "{\"error\"", 8);
}

#endif
