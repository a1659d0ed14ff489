// Every fourth byte of the generated text is upper case if it is an ASCII letter.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/upper4.c -o upper4.wasm
#include "tokenbus.h"

// The state is the number of bytes so far, modulo 4.
static uint32_t upper4_initial(void) { return 0; }

static uint32_t upper4_append(uint32_t count, uint8_t byte) {
    (void)byte;
    return (count + 1) % 4;
}

static bool upper4_byte_allowed(uint32_t count, uint8_t byte) {
    return count != 3 || byte < 'a' || byte > 'z';
}

static bool upper4_special_allowed(uint32_t count, tb_special token) {
    (void)count;
    return token == TB_EOS;
}

TB_FUNCTIONAL_RECOGNIZER(upper4, uint32_t)

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    tb_use_recognizer(upper4_recognizer());
}
