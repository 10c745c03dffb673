// llama-warden, patch set server: see docs/patches.md. This file is llama-warden's own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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

// At load, so that the start-up log has the line.
[[maybe_unused]] static const bool announced = cancel_nonstream();

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
