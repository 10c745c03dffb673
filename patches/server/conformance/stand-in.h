// Stands before a tree's own code: the parts of llama.h that the checkpoints use, with a context that is only numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <string>
#include <vector>

typedef int32_t  llama_pos;
typedef int32_t  llama_token;
typedef int32_t  llama_seq_id;
typedef uint32_t llama_state_seq_flags;
#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY 1

struct llama_model {
    std::string description = "gemma 270M Q4_K - Medium";
    uint64_t    bytes = 250000000, parameters = 270000000;
    int32_t     window = 512;
};
struct llama_context {
    llama_model          model;
    uint32_t             n_ctx = 4096, n_batch = 2048, n_ubatch = 512, n_seq_max = 1;
    llama_pos            first = 200, last = 999;
    std::vector<uint8_t> state = std::vector<uint8_t>(333, 'e');
};
typedef llama_context * llama_memory_t;

inline const llama_model * llama_get_model(const llama_context * context) { return &context->model; }
inline llama_memory_t llama_get_memory(llama_context * context) { return context; }
inline int32_t llama_model_desc(const llama_model * model, char * text, size_t size) {
    return std::snprintf(text, size, "%s", model->description.c_str());
}
inline uint64_t llama_model_size(const llama_model * model) { return model->bytes; }
inline uint64_t llama_model_n_params(const llama_model * model) { return model->parameters; }
inline int32_t llama_model_n_swa(const llama_model * model) { return model->window; }
inline uint32_t llama_n_ctx(const llama_context * context) { return context->n_ctx; }
inline uint32_t llama_n_batch(const llama_context * context) { return context->n_batch; }
inline uint32_t llama_n_ubatch(const llama_context * context) { return context->n_ubatch; }
inline uint32_t llama_n_seq_max(const llama_context * context) { return context->n_seq_max; }
inline llama_pos llama_memory_seq_pos_min(llama_memory_t memory, llama_seq_id) { return memory->first; }
inline llama_pos llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id) { return memory->last; }
inline size_t llama_state_seq_get_size_ext(llama_context * context, llama_seq_id, llama_state_seq_flags) {
    return context->state.size();
}
inline size_t llama_state_seq_get_data_ext(llama_context * context, uint8_t * to, size_t size, llama_seq_id,
                                           llama_state_seq_flags) {
    if (size < context->state.size()) {
        return 0;
    }
    std::memcpy(to, context->state.data(), context->state.size());
    return context->state.size();
}
