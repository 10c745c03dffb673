// A waiting loop in the shape of the server's: each result wakes all who wait, and each wake restarts the wait. A thread
// plays a busy server: results of others come twenty times a second, and the one that is waited for only after sixty. On a
// quiet server nothing comes. Prints what came of the wait, and after how many milliseconds.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

#include "llama-warden-server.h"

static std::mutex              results_mutex;
static std::condition_variable condition_results;
static bool                    mine_is_there = false;
static std::atomic<int>        of_others{ 0 };

static const char * wait_for_mine(int timeout) {
    const llama_warden::wait_deadline llama_warden_deadline("server");
    while (true) {
        std::unique_lock<std::mutex> lock(results_mutex);
        if (mine_is_there) {
            return "result";
        }
        const llama_warden::watched_results condition_results(::condition_results, llama_warden_deadline);
        if (condition_results.wait_for(lock, std::chrono::seconds(timeout)) == std::cv_status::timeout) {
            return "timeout";
        }
    }
}

int main(int count, char ** arguments) {
    const std::string kind = count < 2 ? "busy" : arguments[1];
    std::atomic<bool> over{ false };
    mine_is_there = kind == "there";
    std::thread server([&] {
        while (!over) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            if (kind == "quiet") { continue; }
            std::lock_guard<std::mutex> lock(results_mutex);
            mine_is_there = ++of_others >= 60;
            condition_results.notify_all();
        }
    });
    const auto   begin  = std::chrono::steady_clock::now();
    const char * what   = wait_for_mine(1);
    const auto   waited = std::chrono::steady_clock::now() - begin;
    over                = true;
    server.join();
    std::printf("%s %lld\n", what,
                (long long) std::chrono::duration_cast<std::chrono::milliseconds>(waited).count());
}
