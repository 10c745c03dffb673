// Saves and restores the checkpoints of slots that are made of the tree's own checkpoints. Each scenario is a process with
// the variables that set.toml names. Exit code 0: as promised. 1: a check failed. 77: this tree has no checkpoints.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

#if !__has_include("llama-warden-checkpoints.h")

int main() {
    std::puts("prompts have no checkpoints here");
    return 77;
}

#else

#include "llama-warden-checkpoints.h"

#include <sys/stat.h>
#include <unistd.h>

#define CHECK(holds)                                                                  \
    do {                                                                              \
        if (!(holds)) {                                                               \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds); \
            std::fflush(stderr);                                                      \
            std::_Exit(1);                                                            \
        }                                                                             \
    } while (false)

namespace {

namespace own = llama_warden::checkpoints;

using list       = decltype(::checkpoints); // the tree's line of this name
using checkpoint = list::value_type;
using bytes      = std::vector<uint8_t>;

struct prompt {
    std::vector<llama_token> tokens;
    list                     checkpoints;
};
struct slot {
    int             id      = 3;
    llama_context * ctx_tgt = nullptr;
    llama_context * ctx_dft = nullptr;
    int             n_ctx   = 4096;
    ::prompt        prompt;
};
struct model_file {
    std::string path = "model";
};
struct adapter {
    std::string path;
    float       scale;
};
struct parameters {
    model_file           model;
    int                  cache_type_k = 1, cache_type_v = 1;
    bool                 swa_full = false, kv_unified = false;
    std::vector<adapter> lora_adapters;
};

llama_context       target, draft;
parameters          given;
const std::string   name = "conversation.slot", beside = name + ".checkpoints";

bytes read(const std::string & path) {
    bytes       all;
    std::FILE * file = std::fopen(path.c_str(), "rb");
    for (int next; file != nullptr && (next = std::fgetc(file)) != EOF;) {
        all.push_back((uint8_t) next);
    }
    if (file != nullptr) {
        std::fclose(file);
    }
    return all;
}
void write(const std::string & path, const bytes & all) {
    std::FILE * file = std::fopen(path.c_str(), "wb");
    CHECK(file != nullptr && (all.empty() || std::fwrite(all.data(), 1, all.size(), file) == all.size()));
    CHECK(std::fclose(file) == 0);
}
bool exists(const std::string & path) {
    struct stat facts;
    return ::lstat(path.c_str(), &facts) == 0;
}

template <class T = checkpoint> void add(slot & to, int64_t tokens, size_t size) {
    T next{};
    next.pos_min = (llama_pos) (tokens > 512 ? tokens - 512 : 0);
    next.pos_max = (llama_pos) tokens - 1;
    if constexpr (own::has_n_tokens<T>::value) {
        next.n_tokens = tokens;
    }
    own::target_of(next) = bytes(size, (uint8_t) tokens);
    if constexpr (own::has_data_dft<T>::value) {
        if (to.ctx_dft != nullptr) {
            next.data_dft = bytes(size / 2 + 1, 'd');
        }
    }
    if constexpr (own::has_data_spec<T>::value) {
        if (to.ctx_dft != nullptr) {
            next.data_spec = bytes(7, 's');
        }
    }
    to.prompt.checkpoints.push_back(next);
}

// A slot with 1000 tokens, and checkpoints after 400, 900 and 996 of them.
slot filled(size_t size = 40) {
    slot made;
    made.ctx_tgt = &target;
    for (int i = 0; i < 1000; ++i) {
        made.prompt.tokens.push_back(i * 7 % 1000);
    }
    for (const int64_t tokens : { 400, 900, 996 }) {
        add(made, tokens, size);
    }
    return made;
}

void save(slot & from) {
    if (!exists(name)) {
        write(name, bytes(5000, 'k'));
    }
    llama_warden::save_checkpoints(from, given, name, "saved");
}

// The checkpoints of a slot after a restore; before it, the slot has one of another prompt.
list restored(slot to) {
    to.prompt.checkpoints.clear();
    add(to, 77, 9);
    llama_warden::restore_checkpoints(to, given, name, "restored");
    return to.prompt.checkpoints;
}
list restored() { return restored(filled()); }

template <class T> bool same_one(const T & one, const T & other) {
    bool equal = one.pos_min == other.pos_min && one.pos_max == other.pos_max && own::target_of(one) == own::target_of(other);
    if constexpr (own::has_n_tokens<T>::value) {
        equal = equal && one.n_tokens == other.n_tokens;
    }
    if constexpr (own::has_data_dft<T>::value) {
        equal = equal && one.data_dft == other.data_dft;
    }
    if constexpr (own::has_data_spec<T>::value) {
        equal = equal && one.data_spec == other.data_spec;
    }
    return equal;
}
bool same(const list & one, const list & other) {
    auto at = other.begin();
    for (const checkpoint & next : one) {
        if (at == other.end() || !same_one(next, *at++)) {
            return false;
        }
    }
    return at == other.end();
}

// Without a variable no file is made or read, and the slot stays as it is.
void inert() {
    slot own_slot = filled();
    save(own_slot);
    CHECK(!exists(beside) && restored().size() == 1);
}

// Every checkpoint comes back, and with a window one of the slot's end.
void carried() {
    slot from = filled();
    save(from);
    CHECK(same(from.prompt.checkpoints, filled().prompt.checkpoints)); // saving changes nothing
    struct stat facts;
    CHECK(::stat(beside.c_str(), &facts) == 0 && (facts.st_mode & 0777) == 0600 && !exists(beside + ".tmp"));
    list all = restored();
    CHECK(all.size() == 4);
    checkpoint end = all.back();
    CHECK(end.pos_min == target.first && end.pos_max == 999 && own::target_of(end) == target.state);
    all.pop_back();
    CHECK(same(all, from.prompt.checkpoints));
    // A slot that is read into another place, and a file that somebody moved with the slot's file.
    slot other = filled();
    other.id   = 0;
    CHECK(restored(other).size() == 4);

    // Checkpoints that are not in the order of their tokens are saved in it.
    slot mixed = filled();
    add(mixed, 998, 30);
    add(mixed, 997, 20);
    save(mixed);
    all = restored();
    CHECK(all.size() == 6 && all.back().pos_max == 999 && std::prev(all.end(), 2)->pos_max == 997);
    CHECK(same_one(*std::prev(all.end(), 2), *std::prev(mixed.prompt.checkpoints.end(), 2)));

    target.model.window = 0; // recurrent: the state itself is the end
    save(from);
    CHECK(same(restored(), from.prompt.checkpoints));
    target.model.window = 512;
    given.swa_full      = true;
    save(from);
    CHECK(same(restored(), from.prompt.checkpoints));
}

void with_a_draft() {
    slot from = filled();
    from.ctx_dft = &draft;
    from.prompt.checkpoints.clear();
    add(from, 996, 40);
    save(from);
    slot to = filled();
    to.ctx_dft = &draft;
    CHECK(same(restored(to), from.prompt.checkpoints));
    draft.model.bytes += 1;
    CHECK(restored(to).empty());
    draft.model.bytes -= 1;
    CHECK(restored(to).size() == 1 && restored().empty()); // the other slot has no draft
}

// Cut after any byte, longer by one, or with one bit changed anywhere: nothing of it is used.
void damaged() {
    slot from = filled();
    save(from);
    const bytes good = read(beside);
    CHECK(restored().size() == 4);
    for (size_t size = 0; size < good.size(); ++size) {
        write(beside, bytes(good.begin(), good.begin() + (std::ptrdiff_t) size));
        CHECK(restored().empty());
    }
    bytes longer = good;
    longer.push_back(0);
    write(beside, longer);
    CHECK(restored().empty());
    for (size_t at = 0; at < good.size(); ++at) {
        bytes flipped = good;
        flipped[at] ^= (uint8_t) (1u << at % 8);
        write(beside, flipped);
        CHECK(restored().empty());
    }
    write(beside, good);
    CHECK(restored().size() == 4);
    // No file, a folder and a link are no file of checkpoints.
    CHECK(::rename(beside.c_str(), "elsewhere") == 0);
    CHECK(restored().empty());
    CHECK(::symlink("elsewhere", beside.c_str()) == 0);
    CHECK(restored().empty());
    save(from); // replaces the link, and not what it names
    CHECK(read("elsewhere") == good && restored().size() == 4);
    CHECK(::unlink(beside.c_str()) == 0 && ::mkdir(beside.c_str(), 0700) == 0);
    CHECK(restored().empty());
    save(from);
    CHECK(restored().empty() && !exists(beside + ".tmp"));
}

template <class T> void differs(T & value, const T & other) {
    const T before = value;
    value          = other;
    CHECK(restored().empty());
    value = before;
    CHECK(restored().size() == 4);
}

// Another model, argument, prompt or slot file: nothing of it is used.
void foreign() {
    slot from = filled();
    save(from);
    differs(target.model.description, std::string("qwen"));
    differs(target.model.bytes, (uint64_t) 1);
    differs(target.model.parameters, (uint64_t) 1);
    differs(target.model.window, 1024);
    differs(target.n_ctx, 8192u);
    differs(target.n_batch, 512u);
    differs(target.n_ubatch, 256u);
    differs(target.n_seq_max, 2u);
    differs(target.last, 900);
    differs(given.cache_type_k, 8);
    differs(given.cache_type_v, 8);
    differs(given.kv_unified, true);
    differs(given.swa_full, true);
    differs(given.lora_adapters, std::vector<adapter>{ { "one", 0.5f } });
    write("model", bytes(10, 'm')); // the model's file has come
    CHECK(restored().empty());
    CHECK(::unlink("model") == 0 && restored().size() == 4);
    slot other = filled();
    other.prompt.tokens[500] += 1;
    CHECK(restored(other).empty());
    other.prompt.tokens = filled().prompt.tokens;
    other.n_ctx         = 2048;
    CHECK(restored(other).empty());
    const bytes state = read(name);
    bytes       longer = state;
    longer.push_back('k');
    write(name, longer);
    CHECK(restored().empty());
    bytes changed = state;
    changed.back() = 'x';
    write(name, changed);
    CHECK(restored().empty());
    write(name, state);
    CHECK(restored().size() == 4);
}

// Saved again without checkpoints, or without a slot's file: the old file goes.
void replaced() {
    slot from = filled();
    save(from);
    CHECK(exists(beside));
    from.prompt.checkpoints.clear();
    save(from);
    CHECK(!exists(beside) && restored().empty());
    from = filled();
    write(beside + ".tmp", bytes(10, 'x')); // of a process that was killed
    save(from);
    CHECK(restored().size() == 4 && !exists(beside + ".tmp"));
    write(name, {});
    save(from);
    CHECK(!exists(beside));
}

// Three checkpoints at most, and a file of 1 MiB: the latest are kept.
void bounded() {
    slot from = filled();
    save(from);
    list all = restored();
    CHECK(all.size() == 3 && all.front().pos_max == 899 && all.back().pos_max == 999);
    slot large = filled(600 << 10);
    save(large);
    all = restored();
    CHECK(all.size() == 2 && all.front().pos_max == 995 && read(beside).size() <= 1 << 20);
    target.model.window = 0;
    slot huge = filled(1 << 20);
    save(huge);
    CHECK(!exists(beside) && restored().empty());
    // A larger file than this process would write.
    target.model.window = 512;
    save(large);
    bytes file = read(beside);
    file.resize((1 << 20) + 1);
    write(beside, file);
    CHECK(restored().empty());
}

struct scenario {
    const char * name;
    void (*run)();
};
constexpr scenario scenarios[] = { { "inert", inert },     { "carried", carried },   { "draft", with_a_draft },
                                   { "damaged", damaged }, { "foreign", foreign },   { "replaced", replaced },
                                   { "bounded", bounded } };

} // namespace

int main(int count, char ** words) {
    for (const scenario & one : scenarios) {
        if (count > 1 && std::strcmp(words[1], one.name) == 0) {
            one.run();
            return 0;
        }
    }
    return 2;
}

#endif
