// llama-warden, patch set server: see docs/patches.md. This file is llama-warden's own.
#pragma once

#include <chrono>
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

// The moment at which a wait for a result has to end, however often it is woken up in between by results of others.
// The waiting code restarts its timeout at each of those, so that on a busy server it never came to look whether its
// client is still there.
class wait_deadline {
  public:
    explicit wait_deadline(int seconds) : at(clock::now() + std::chrono::seconds(seconds)) {}

    // True when the wait should be given up; never while the fix is off.
    bool passed() const { return cancel_nonstream() && clock::now() >= at; }

  private:
    using clock = std::chrono::steady_clock;
    clock::time_point at;
};

} // namespace llama_warden
