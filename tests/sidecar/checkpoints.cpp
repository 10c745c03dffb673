// The conformance program of the checkpoints, with the checkpoints of each era: SHAPE is FIRST (b6723), COUNTED (b8218),
// DRAFTED (b9109), NOW (b9666), or UNKNOWN, which has a member that the sidecar does not know.
#include "../../patches/server/conformance/stand-in.h"

#define FIRST 1
#define COUNTED 2
#define DRAFTED 3
#define NOW 4
#define UNKNOWN 5

struct one_checkpoint {
#if SHAPE == FIRST || SHAPE == COUNTED
    llama_pos pos_min;
    llama_pos pos_max;
#if SHAPE == COUNTED
    int64_t n_tokens;
#endif
    std::vector<uint8_t> data;

    size_t size() const { return data.size(); }
#else
    int64_t n_tokens;
#if SHAPE != DRAFTED
    int id_task = -1;
#endif
    llama_pos            pos_min;
    llama_pos            pos_max;
    std::vector<uint8_t> data_tgt;
    std::vector<uint8_t> data_dft;
#if SHAPE != DRAFTED
    std::vector<uint8_t> data_spec;
#endif
#if SHAPE == UNKNOWN
    std::vector<float> data_more;
#endif

    size_t size() const;
    void   clear();
#endif
};

std::list<one_checkpoint> checkpoints;

#include "llama-warden-checkpoints.h"

#include "../../patches/server/conformance/checkpoints.cpp"
