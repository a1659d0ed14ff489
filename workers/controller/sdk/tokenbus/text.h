// Text: formats, the log, errors, numbers, search.
#ifndef TOKENBUS_TEXT_H
#define TOKENBUS_TEXT_H

#define TB_IMPORT(name) __attribute__((import_module("tokenbus"), import_name(name)))

TB_IMPORT("log") void tb_host_log(const void *text, uint32_t n);
TB_IMPORT("fail") void tb_host_fail(const void *text, uint32_t n);

// Appends formatted text: %d %i %u %x %c %s %%, with l, ll and z, a width (a leading 0 pads with
// zeros), and for %s a precision (%.*s). Any other format is an error: no %f, %p or %-8s.
static inline void tb_format_list(tb_bytes *out, const char *format, va_list list) {
    for (const char *at = format; *at;) {
        if (*at != '%') {
            const char *end = at;
            while (*end && *end != '%') end++;
            tb_bytes_append(out, at, (uint32_t)(end - at));
            at = end;
            continue;
        }
        at++;
        const bool zeros = *at == '0';
        uint32_t width = 0, precision = TB_NONE, longs = 0;
        while (*at >= '0' && *at <= '9') width = width * 10 + (uint32_t)(*at++ - '0');
        if (at[0] == '.' && at[1] == '*') {
            precision = va_arg(list, uint32_t);
            at += 2;
        } else if (*at == '.') {
            for (precision = 0, at++; *at >= '0' && *at <= '9';)
                precision = precision * 10 + (uint32_t)(*at++ - '0');
        }
        while (*at == 'l' || *at == 'z') longs += *at++ == 'l';
        const char kind = *at ? *at++ : '%';
        char digits[24];
        const char *text = digits + sizeof digits;
        uint32_t n = 0;
        bool minus = false;
        if (kind == 's') {
            text = va_arg(list, const char *);
            while (n < precision && text[n]) n++;
        } else if (kind == 'd' || kind == 'i' || kind == 'u' || kind == 'x') {
            uint64_t value;
            if (kind == 'd' || kind == 'i') {
                const int64_t given = longs > 1 ? va_arg(list, int64_t) : va_arg(list, int32_t);
                minus = given < 0;
                value = minus ? -(uint64_t)given : (uint64_t)given;
            } else {
                value = longs > 1 ? va_arg(list, uint64_t) : va_arg(list, uint32_t);
            }
            const uint32_t base = kind == 'x' ? 16 : 10;
            char *digit = digits + sizeof digits;
            do *--digit = "0123456789abcdef"[value % base];
            while (value /= base);
            n = (uint32_t)(digits + sizeof digits - digit);
            text = digit;
        } else if (kind == 'c' || kind == '%') {
            digits[0] = kind == 'c' ? (char)va_arg(list, int) : '%';
            text = digits;
            n = 1;
        } else {
            tb_fail("the format \"%s\" has a %%%c; expected %%d %%i %%u %%x %%c %%s or %%%%, "
                    "with a width or a precision where it is allowed",
                    format, kind);
        }
        const char *pad = zeros && kind != 's' && kind != 'c' ? "0" : " ";
        if (minus && *pad == '0') tb_bytes_append(out, "-", 1);
        for (uint32_t have = n + minus; have < width; have++) tb_bytes_append(out, pad, 1);
        if (minus && *pad == ' ') tb_bytes_append(out, "-", 1);
        tb_bytes_append(out, text, n);
    }
}

__attribute__((format(printf, 2, 3))) static inline void tb_format(tb_bytes *out,
                                                                   const char *format, ...) {
    va_list list;
    va_start(list, format);
    tb_format_list(out, format, list);
    va_end(list);
}

// Writes to the log of this sequence, which the client receives with the next tokens. A newline is
// not added. The host stores up to 64 KiB for each round.
__attribute__((format(printf, 1, 2))) static inline void tb_log(const char *format, ...) {
    tb_bytes line = {0};
    va_list list;
    va_start(list, format);
    tb_format_list(&line, format, list);
    va_end(list);
    tb_host_log(line.data, line.len);
    tb_bytes_free(&line);
}

static inline void tb_fail(const char *format, ...) {
    // A second call means that formatting the text failed, because of a wrong format or a lack of
    // memory. A third call means that memory is also missing for that error's text, so a constant
    // is sent.
    static uint32_t times;
    if (times++ < 2) {
        tb_bytes text = {0};
        va_list list;
        va_start(list, format);
        tb_format_list(&text, format, list);
        va_end(list);
        tb_host_fail(text.data, text.len);
    }
    tb_host_fail("out of memory", 13);
    __builtin_trap();
}

// Reads a decimal integer below 2^32 at *at and moves *at after it; false if no such integer is
// there.
static inline bool tb_read_number(const char **at, const char *end, uint32_t *number) {
    const char *p = *at;
    uint64_t value = 0;
    while (p < end && *p >= '0' && *p <= '9' && value <= UINT32_MAX)
        value = value * 10 + (uint64_t)(*p++ - '0');
    if (p == *at || value > UINT32_MAX) return false;
    *at = p;
    *number = (uint32_t)value;
    return true;
}

// The first position of `what` in `in` at or after `from`; TB_NONE if it does not occur.
static inline uint32_t tb_find(const void *in, uint32_t in_len, const void *what, uint32_t what_len,
                               uint32_t from) {
    for (uint32_t i = from; what_len <= in_len && i <= in_len - what_len; i++)
        if (!memcmp((const uint8_t *)in + i, what, what_len)) return i;
    return TB_NONE;
}

#endif
