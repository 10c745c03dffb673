// Loads a tile configuration from a local variable, as ggml does, on a stack that is full of other bytes.
// Without an argument `ldtilecfg` must have been replaced by code that fills `seen`; with one it is executed.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" {
unsigned char seen[64];
unsigned long kept_rax, kept_rcx;
}

struct alignas(64) Configuration {
    unsigned char palette = 0, start = 0, reserved[14] = {0};
    unsigned short columns[16] = {0};
    unsigned char rows[16] = {0};
};

__attribute__((noinline)) void fill_stack() {
    volatile unsigned char bytes[4096];
    for (int at = 0; at < 4096; at++) bytes[at] = 0xab;
}

__attribute__((noinline)) void configure() {
    Configuration c;
    c.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        c.rows[tile] = 16;
        c.columns[tile] = 64;
    }
    _tile_loadconfig(&c);
}

int main(int count, char **) {
    const long request_permission = 0x1023, tile_data = 18;
    const bool executes = count > 1;
    if (executes && syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return 3;
    fill_stack();
    configure();
    if (executes) return 0;
    for (int at = 0; at < 64; at++) {
        const int tile = at < 48 ? (at - 16) / 2 : at - 48;
        int wanted = at == 0;
        if (at >= 16 && tile < 8) wanted = at >= 48 ? 16 : at % 2 == 0 ? 64 : 0;
        if (((volatile unsigned char *)seen)[at] != wanted) return 1;
    }
    return 0;
}
