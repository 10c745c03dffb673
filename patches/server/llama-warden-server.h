// llama-warden, patch set server: see docs/patches.md. This file is llama-warden's own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

#include "llama-warden-reclaim.h"

#if defined(LLAMA_WARDEN_RECLAIM)
#include <signal.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace llama_warden {

// cancel-nonstream: on when LLAMA_WARDEN_CANCEL_NONSTREAM is 1. Read once.
inline bool cancel_nonstream() {
    static const bool on = [] {
        const char * text = std::getenv("LLAMA_WARDEN_CANCEL_NONSTREAM");
        if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) {
            return false;
        }
        if (std::strcmp(text, "1") != 0) {
            std::fprintf(stderr, "llama-warden: LLAMA_WARDEN_CANCEL_NONSTREAM=%s is ignored: expected 1 or 0\n", text);
            return false;
        }
        std::fprintf(stderr, "llama-warden: fix cancel-nonstream active\n");
        return true;
    }();
    return on;
}

// reclaim-heap: on when LLAMA_WARDEN_RECLAIM names the file of llama-warden-reclaim.h. What was freed and lies on in the heap
// goes back to the system when somebody asks for it there, in a thread that holds no lock of the server's and does nothing
// else. It waits for nobody, and nobody waits for it but those who allocate in the same moment.
#if defined(LLAMA_WARDEN_RECLAIM)
class heap_thread {
  public:
    static bool start() {
        const char * path = std::getenv("LLAMA_WARDEN_RECLAIM");
        if (path == nullptr || *path == '\0') {
            return false;
        }
        std::fprintf(stderr, "llama-warden: fix reclaim-heap active: %s\n", path);
        // Never destroyed: the thread may outlive static objects.
        auto * channel = new reclaim::channel;
        if (!channel->open(path, reclaim::part::host, can)) {
            std::fprintf(stderr, "llama-warden: the heap is not given back on demand: %s is not to be had\n", path);
            return false;
        }
        try {
            std::thread([channel] { run(*channel); }).detach();
        } catch (const std::exception & wrong) { // no more threads: the server can do without this one
            std::fprintf(stderr, "llama-warden: the heap is not given back on demand: no thread: %s\n", wrong.what());
            return false;
        }
        return true;
    }

  private:
    using clock = std::chrono::steady_clock;

#if defined(__GLIBC__)
    static constexpr uint32_t can = reclaim::heap;
#else
    static constexpr uint32_t can = 0; // other allocators have no such call, or another one
#endif
    // Each arena is locked while it is trimmed, and what was given back is faulted in again when it is needed: not more often
    // than this, whoever asks.
    static constexpr std::chrono::seconds pause{ 30 };

    static void run(reclaim::channel & channel) {
        sigset_t all; // signals are for the threads of the server
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        clock::time_point last  = clock::now() - pause;
        reclaim::request  asked = {};
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(250));
            if (!channel.poll(asked) || (asked.what & reclaim::heap) == 0) {
                continue;
            }
            if (can == 0) {
                channel.put(asked.seq, reclaim::result::other_allocator, reclaim::heap, 0, {});
                continue;
            }
            const clock::time_point began = clock::now();
            if (began - last < pause) {
                channel.put(asked.seq, reclaim::result::too_soon, reclaim::heap, 0, {});
                continue;
            }
            const uint64_t before = anonymous();
#if defined(__GLIBC__)
            malloc_trim(0);
#endif
            const uint64_t after = anonymous();
            last                 = clock::now();
            reclaim::channel::amounts given;
            given.bytes[0] = before > after ? before - after : 0;
            using std::chrono::duration_cast;
            const auto ms = duration_cast<std::chrono::milliseconds>(last - began).count();
            channel.put(asked.seq, reclaim::result::done, 0, (uint64_t) ms, given);
        }
    }

    // Bytes in memory that are no file's: a cheap count, exact to some pages for each thread. 0 where it is not told.
    static uint64_t anonymous() {
        unsigned long long size = 0, resident = 0, shared = 0;
        if (std::FILE * file = std::fopen("/proc/self/statm", "re")) {
            if (std::fscanf(file, "%llu %llu %llu", &size, &resident, &shared) != 3 || shared > resident) {
                resident = shared = 0;
            }
            std::fclose(file);
        }
        return (resident - shared) * (uint64_t) ::sysconf(_SC_PAGESIZE);
    }
};
#endif

// At load, so that the start-up log has the lines.
[[maybe_unused]] static const bool announced = [] {
    const bool cancels = cancel_nonstream();
#if defined(LLAMA_WARDEN_RECLAIM)
    return heap_thread::start() || cancels;
#else
    return cancels;
#endif
}();

// How long a thread waits for a result before it looks whether its client is still there. Upstream's own wait is a second,
// and each result of another request restarts it: on a busy server it never came to look.
constexpr std::chrono::milliseconds look_after{ 250 };

// The moment at which a wait for a result has to end, however often it is woken up in between by results of others. With
// the fix off, the wait is upstream's.
class wait_deadline {
  public:
    explicit wait_deadline(const char * mark) : at(clock::now() + look_after) {
        // The mark of the hook: a binary that lacks the text has no such wait in it. Never read.
        static volatile std::atomic<const char *> last_passed{ nullptr };
        last_passed.store(mark, std::memory_order_relaxed);
    }

    template <class Lock, class Duration>
    std::cv_status wait(std::condition_variable & results, Lock & lock, const Duration & timeout) const {
        if (!cancel_nonstream()) {
            return results.wait_for(lock, timeout);
        }
        const auto left = at - clock::now();
        if (left <= clock::duration::zero()) {
            return std::cv_status::timeout;
        }
        return results.wait_for(lock, left);
    }

  private:
    using clock = std::chrono::steady_clock;
    clock::time_point at;
};

// Stands in for the condition variable in the waiting code, which waits as before and is told of a timeout, as it knows how
// to handle, when the deadline has passed.
class watched_results {
  public:
    watched_results(std::condition_variable & results, const wait_deadline & deadline) : results(results), deadline(deadline) {}

    template <class Lock, class Duration> std::cv_status wait_for(Lock & lock, const Duration & timeout) const {
        return deadline.wait(results, lock, timeout);
    }

  private:
    std::condition_variable & results;
    const wait_deadline &     deadline;
};

} // namespace llama_warden
