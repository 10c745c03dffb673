// The heap of a server that is asked for what it does not need. The file of LLAMA_WARDEN_RECLAIM stands before the header
// of the set looks for it, as it does where the supervisor makes both. Exit code 0: as promised. 1: a check failed.
#include "llama-warden-reclaim.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace reclaim = llama_warden::reclaim;

#define CHECK(holds)                                                                  \
    do {                                                                              \
        if (!(holds)) {                                                               \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds); \
            std::fflush(stderr);                                                      \
            std::_Exit(1);                                                            \
        }                                                                             \
    } while (false)

template <class F> static void wait_until(const char * what, F holds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!holds()) {
        if (std::chrono::steady_clock::now() > end) {
            std::fprintf(stderr, "did not come: %s\n", what);
            std::_Exit(1);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

// Before the header, so that it stands before the header's own start. It stays open: a lock would go with it.
static int make() {
    const char * path = std::getenv("LLAMA_WARDEN_RECLAIM");
    if (path == nullptr || *path == '\0') {
        return -1;
    }
    const int       file  = ::open(path, O_CREAT | O_RDWR, 0600);
    reclaim::header begin = {};
    std::memcpy(begin.magic, reclaim::magic, sizeof(begin.magic));
    begin.version = reclaim::version;
    begin.blocks  = reclaim::blocks;
    if (::ftruncate(file, (off_t) reclaim::file_size) != 0 || ::pwrite(file, &begin, sizeof(begin), 0) != (ssize_t) sizeof(begin)) {
        return -1;
    }
    return file;
}
static const int desk = make();

#include "llama-warden-server.h"

static void ask(uint64_t seq, uint32_t what) {
    reclaim::request asked = {};
    asked.seq = seq, asked.what = what, asked.deadline_ms = 1000, asked.check = reclaim::check_of(asked);
    CHECK(::pwrite(desk, &asked, sizeof(asked), (off_t) reclaim::block_size) == (ssize_t) sizeof(asked));
}
static reclaim::answer look() {
    reclaim::answer answer = {};
    CHECK(::pread(desk, &answer, sizeof(answer), (off_t) (2 * reclaim::block_size)) == (ssize_t) sizeof(answer));
    return answer.check == reclaim::check_of(answer) ? answer : reclaim::answer{};
}
static reclaim::answer answered(uint64_t seq) {
    wait_until("an answer", [&] { return look().seq == seq && look().result != 0; });
    return look();
}

static size_t threads() {
    size_t count = 0;
    if (FILE * file = std::fopen("/proc/self/status", "r")) {
        char text[256];
        while (std::fgets(text, sizeof(text), file) != nullptr) {
            (void) std::sscanf(text, "Threads: %zu", &count);
        }
        std::fclose(file);
    }
    return count;
}

int main(int count, char ** arguments) {
#if defined(__SANITIZE_THREAD__)
    const size_t own = 2; // the sanitizer has one, too
#else
    const size_t own = 1;
#endif
    if (count > 1 && std::string(arguments[1]) == "inert") { // no variable: no thread
        CHECK(threads() <= own && !llama_warden::announced);
        return 0;
    }
    CHECK(threads() == own + 1 && look().pid == (uint32_t) ::getpid() && look().able == reclaim::heap);
    // Small pieces, of which the last stays: nothing of them can go back by itself.
    std::vector<void *> pieces;
    pieces.reserve(64 * 1024);
    for (int i = 0; i < 64 * 1024; ++i) {
        pieces.push_back(std::memset(std::malloc(1024), 1, 1024));
    }
    void * last = pieces.back();
    pieces.pop_back();
    for (void * piece : pieces) {
        std::free(piece);
    }
    // Others allocate meanwhile.
    std::atomic<bool> over{ false };
    std::thread       busy([&] {
        while (!over) {
            std::free(std::malloc(4096));
        }
    });
    ask(1, reclaim::graphs); // somebody else's: it answers nothing
    ask(2, reclaim::heap | reclaim::graphs);
    const reclaim::answer answer = answered(2);
    CHECK(answer.result == (uint16_t) reclaim::result::done && answer.left == 0);
    std::printf("bytes %llu\n", (unsigned long long) answer.bytes[0]);
    ask(3, reclaim::heap); // not again at once, whoever asks
    CHECK(answered(3).result == (uint16_t) reclaim::result::too_soon && look().left == reclaim::heap && look().bytes[0] == 0);
    over = true;
    busy.join();
    std::free(last);
    return 0;
}
