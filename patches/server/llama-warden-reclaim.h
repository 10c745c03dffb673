// llama-warden, patch sets server and cuda-memory: the file by which a running server is asked to give memory back;
// docs/patches.md describes it. This file is llama-warden's own. Both sets have it, byte for byte the same: a test compares them.
//
// The supervisor makes the file before it makes the process, and writes requests into it; each part of each process writes
// its answers into a block of its own. Nobody maps it: a store into a mapping ends the process when the disk is full or
// somebody cuts the file, and a command is never worth a server. Whoever has a block holds a lock on its bytes, by which
// the supervisor knows who is there to answer.
#ifndef LLAMA_WARDEN_RECLAIM_H // by name and not by file: there may be two of them on a path
#define LLAMA_WARDEN_RECLAIM_H

#if defined(__unix__) || defined(__APPLE__)
#define LLAMA_WARDEN_RECLAIM

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace llama_warden {
namespace reclaim {

// What may be asked for, and what a part can do.
enum : uint32_t { graphs = 1, pools = 2, cublas = 4, heap = 8 };

enum class part : uint32_t { host, cuda };

// How a request ended. `none`: of this one nothing is known, it stood there before the process came.
enum class result : uint16_t { none, done, partly, refused, failed, too_soon, other_allocator };

// All numbers are in the machine's byte order. `check` is of the bytes before it: what was torn or is garbage is passed over.
struct header {
    char     magic[8];
    uint32_t version, blocks; // of each part
    uint64_t unused[6];
};
struct request {
    uint64_t seq; // rises with each
    uint32_t what, deadline_ms; // since a part saw it
    uint64_t unused[5];
    uint64_t check;
};
struct answer {
    uint64_t seq; // of the request that is answered
    uint64_t bytes[4]; // cuda: graphs (host), graphs (device), pools, cuBLAS; host: heap, and the rest is zero
    uint32_t ms; // at work, the waiting for a good moment not counted
    uint16_t result, left; // `left`: of what was asked and this part can do, what did not come to its end
    uint32_t pid, able;
    uint64_t check;
};
constexpr char     magic[] = "LWRECL1"; // eight bytes with its end
constexpr uint32_t version = 1, blocks = 16;
constexpr size_t   block_size = 64, file_size = block_size * (2 + 2 * blocks);
static_assert(sizeof(header) == block_size && sizeof(request) == block_size && sizeof(answer) == block_size, "the file's layout");

template <class T> uint64_t check_of(const T & block) {
    unsigned char bytes[block_size];
    std::memcpy(bytes, &block, block_size);
    uint64_t hash = 0xcbf29ce484222325ull; // FNV-1a
    for (size_t i = 0; i < block_size - sizeof(uint64_t); ++i) {
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    }
    return hash;
}

class channel {
  public:
    // Takes a block of this part. False when the file is not one of ours, when another process has the last block, or where
    // files cannot be locked: then nobody would know that we are here.
    //
    // What stands in the file now counts as done. The file stays open even then: to close it would give up the lock that
    // another part of this process may hold on it.
    bool open(const char * path, part which, uint32_t able) {
        file = ::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        struct stat is = {};
        header      begin = {};
        if (file < 0 || ::fstat(file, &is) != 0 || !S_ISREG(is.st_mode) || is.st_size != (off_t) file_size || !get(begin, 0) ||
            std::memcmp(begin.magic, magic, sizeof(begin.magic)) != 0 || begin.version != version || begin.blocks != blocks) {
            return false;
        }
        for (uint32_t i = 0; i < blocks && at == 0; ++i) {
            const off_t  place = (off_t) (block_size * (2 + blocks * (uint32_t) which + i));
            struct flock lock = {};
            lock.l_type   = F_WRLCK;
            lock.l_whence = SEEK_SET;
            lock.l_start  = place;
            lock.l_len    = (off_t) block_size;
            if (::fcntl(file, F_SETLK, &lock) == 0) {
                at = place;
            }
        }
        if (at == 0) {
            return false;
        }
        request stands = {};
        last = get(stands, block_size) && stands.check == check_of(stands) ? stands.seq : 0;
        can  = able;
        put(last, result::none, 0, 0, {});
        return true;
    }

    // Whether there is a request that was not seen before, and which.
    bool poll(request & asked) {
        request stands = {};
        if (at == 0 || !get(stands, block_size) || stands.seq <= last || stands.check != check_of(stands)) {
            return false;
        }
        last  = stands.seq;
        asked = stands;
        return true;
    }

    struct amounts {
        uint64_t bytes[4] = {};
    };

    // One write; on a full disk the answer is lost, and nothing else.
    void put(uint64_t seq, result how, uint32_t left, uint64_t ms, const amounts & given) const {
        answer block = {};
        block.seq    = seq;
        std::memcpy(block.bytes, given.bytes, sizeof(block.bytes));
        block.ms     = (uint32_t) (ms < UINT32_MAX ? ms : UINT32_MAX);
        block.result = (uint16_t) how;
        block.left   = (uint16_t) left;
        block.pid    = (uint32_t) ::getpid();
        block.able   = can;
        block.check  = check_of(block);
        (void) !::pwrite(file, &block, sizeof(block), at);
    }

  private:
    template <class T> bool get(T & block, size_t from) const {
        return ::pread(file, &block, sizeof(block), (off_t) from) == (ssize_t) sizeof(block);
    }

    int      file = -1;
    off_t    at   = 0; // of our block
    uint64_t last = 0; // request that was seen
    uint32_t can  = 0;
};

} // namespace reclaim
} // namespace llama_warden
#endif

#endif
