// llama-warden, patch set server, fix slot-checkpoints: see docs/patches.md. This file is llama-warden's own.
//
// llama-server writes a slot's tokens and state to a file, but not the slot's context checkpoints. A model with a sliding
// window or recurrent state cannot go back without a checkpoint, so it evaluates the whole prompt again after a restore.
// This fix writes the checkpoints to a second file, NAME.checkpoints, and reads them back. A file that is damaged, or that
// another build, model, argument or slot file made, is ignored as a whole.
//
// The file has these parts, all numbers in the machine's byte order:
//   header       file_header, 80 bytes
//   entries      file_entry, 40 bytes each, in the order of their tokens
//   states       for each entry: target, draft, speculative decoding
//   check        u64, of everything before it
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#define LLAMA_WARDEN_CHECKPOINTS
#include <cerrno>
#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace llama_warden {
namespace checkpoints {

// ------------------------------------------------------------------------------------------------------------- settings

struct settings {
    bool     on    = false;
    uint64_t count = 0; // checkpoints of a slot
    uint64_t bytes = 0; // of a file
};

inline bool read_number(const char * name, uint64_t min, uint64_t max, uint64_t & value) {
    const char * text = std::getenv(name);
    if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) {
        return false;
    }
    char * end = nullptr;
    const unsigned long long number = std::strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || number < min || number > max) {
        std::fprintf(stderr, "llama-warden: %s=%s is ignored: expected %llu to %llu, or 0\n", name, text,
                     (unsigned long long) min, (unsigned long long) max);
        return false;
    }
    value = number;
    return true;
}

// On when LLAMA_WARDEN_SLOT_CHECKPOINTS is a number of checkpoints. Read once.
inline const settings & asked() {
    static const settings all = [] {
        settings found;
        if (!read_number("LLAMA_WARDEN_SLOT_CHECKPOINTS", 1, 1024, found.count)) {
            return found;
        }
        uint64_t mib = 1024;
        read_number("LLAMA_WARDEN_SLOT_CHECKPOINTS_SIZE_MIB", 1, 1048576, mib);
        found.bytes = mib << 20;
#if defined(LLAMA_WARDEN_CHECKPOINTS)
        found.on = true;
        std::fprintf(stderr, "llama-warden: fix slot-checkpoints active: %llu checkpoints, %llu MiB\n",
                     (unsigned long long) found.count, (unsigned long long) mib);
#else
        std::fprintf(stderr, "llama-warden: slot-checkpoints is ignored: this system is not supported\n");
#endif
        return found;
    }();
    return all;
}

// ----------------------------------------------------------------------------------------------------------------- hash

// 64 bits over pieces of bytes: each step is a bijection, so a flipped bit always changes the result.
class hash {
  public:
    void add(const void * data, size_t size) {
        const unsigned char * at = (const unsigned char *) data;
        const unsigned char * end = at + size;
        for (; end - at >= 8; at += 8) {
            uint64_t word;
            std::memcpy(&word, at, 8);
            mix(word);
        }
        uint64_t rest = 0;
        if (at != end) {
            std::memcpy(&rest, at, (size_t) (end - at));
        }
        mix(rest);
        mix((uint64_t) size); // the borders between pieces count
    }
    void add(const std::string & text) { add(text.data(), text.size()); }
    template <class T> std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>> number(T value) {
        const double as_number = (double) value; // types of upstream's members differ between versions
        add(&as_number, sizeof(as_number));
    }
    uint64_t value() const {
        uint64_t end = state;
        end ^= end >> 29;
        end *= 0xbf58476d1ce4e5b9ull;
        return end ^ end >> 32;
    }

  private:
    uint64_t state = 0x6c776172'64656e31ull;

    void mix(uint64_t word) {
        state = (state ^ word) * 0x9e3779b97f4a7c15ull;
        state ^= state >> 32;
    }
};

#if defined(LLAMA_WARDEN_CHECKPOINTS)

// -------------------------------------------------------------------------------------------------------- file's layout

constexpr char     magic[]  = "LWCKPT1"; // eight bytes with its end
constexpr uint32_t version  = 1;
constexpr uint64_t most     = 4096; // checkpoints of any file
constexpr char     suffix[] = ".checkpoints";

struct file_header {
    char     magic[8];
    uint32_t version;
    uint32_t count;
    uint64_t size;      // of the file
    uint64_t build;     // the executable and its own libraries
    uint64_t model;     // models and adapters
    uint64_t arguments; // context, batch, cache types, attention
    uint64_t slot;      // the slot's file
    uint64_t tokens;    // the slot's tokens
    uint64_t n_tokens;
    uint64_t unused;
};
struct file_entry {
    int64_t  n_tokens;
    int32_t  pos_min, pos_max;
    uint64_t target, draft, spec; // bytes
};
static_assert(sizeof(file_header) == 80 && sizeof(file_entry) == 40, "the file's layout");

// -------------------------------------------------------------------------------------------- upstream's members by name

#define LLAMA_WARDEN_MEMBER(name)                                                                                        \
    template <class T, class = void> struct has_##name : std::false_type {};                                             \
    template <class T> struct has_##name<T, std::void_t<decltype(std::declval<T &>().name)>> : std::true_type {};
LLAMA_WARDEN_MEMBER(checkpoints)
LLAMA_WARDEN_MEMBER(ctx)
LLAMA_WARDEN_MEMBER(ctx_tgt)
LLAMA_WARDEN_MEMBER(ctx_dft)
LLAMA_WARDEN_MEMBER(n_tokens)
LLAMA_WARDEN_MEMBER(id_task)
LLAMA_WARDEN_MEMBER(data)
LLAMA_WARDEN_MEMBER(data_tgt)
LLAMA_WARDEN_MEMBER(data_dft)
LLAMA_WARDEN_MEMBER(data_spec)
LLAMA_WARDEN_MEMBER(swa_full)
LLAMA_WARDEN_MEMBER(kv_unified)
LLAMA_WARDEN_MEMBER(cache_type_k)
LLAMA_WARDEN_MEMBER(cache_type_v)
LLAMA_WARDEN_MEMBER(flash_attn)
LLAMA_WARDEN_MEMBER(flash_attn_type)
LLAMA_WARDEN_MEMBER(rope_freq_base)
LLAMA_WARDEN_MEMBER(rope_freq_scale)
LLAMA_WARDEN_MEMBER(rope_scaling_type)
LLAMA_WARDEN_MEMBER(yarn_ext_factor)
LLAMA_WARDEN_MEMBER(yarn_orig_ctx)
LLAMA_WARDEN_MEMBER(model)
LLAMA_WARDEN_MEMBER(path)
LLAMA_WARDEN_MEMBER(lora_adapters)
LLAMA_WARDEN_MEMBER(control_vectors)
#undef LLAMA_WARDEN_MEMBER

// The number of members of an aggregate; 0 for another type.
struct anything {
    template <class T> operator T() const;
};
template <class T, size_t... I>
auto braces(std::index_sequence<I...>) -> decltype(T{ ((void) I, anything{})... }, std::true_type{});
template <class T> std::false_type braces(...);
template <class T, size_t N = 16> constexpr size_t members() {
    if constexpr (N == 0) {
        return 0;
    } else if constexpr (decltype(braces<T>(std::make_index_sequence<N>{}))::value) {
        return N;
    } else {
        return members<T, N - 1>();
    }
}

template <class T> constexpr size_t known_members() {
    return 2 /* pos_min, pos_max */ + has_n_tokens<T>::value + has_id_task<T>::value + has_data<T>::value +
           has_data_tgt<T>::value + has_data_dft<T>::value + has_data_spec<T>::value;
}

template <class List> using checkpoint_of = typename std::decay_t<List>::value_type;

template <class T> auto & target_of(T & checkpoint) {
    if constexpr (has_data_tgt<T>::value) {
        return checkpoint.data_tgt;
    } else {
        return checkpoint.data;
    }
}

using blob = std::vector<uint8_t>;

// A checkpoint without upstream's type; the states are borrowed when writing.
struct view {
    file_entry   entry;
    const blob * states[3];
};

template <class T> view view_of(const T & checkpoint, int64_t n_tokens) {
    static const blob none;
    view seen = {};
    if constexpr (has_n_tokens<const T>::value) {
        n_tokens = checkpoint.n_tokens;
    }
    seen.states[0] = &target_of(checkpoint);
    seen.states[1] = seen.states[2] = &none;
    if constexpr (has_data_dft<const T>::value) {
        seen.states[1] = &checkpoint.data_dft;
    }
    if constexpr (has_data_spec<const T>::value) {
        seen.states[2] = &checkpoint.data_spec;
    }
    seen.entry = { n_tokens,
                   checkpoint.pos_min,
                   checkpoint.pos_max,
                   seen.states[0]->size(),
                   seen.states[1]->size(),
                   seen.states[2]->size() };
    return seen;
}

template <class Slot> auto * context_of(Slot & slot) {
    if constexpr (has_ctx_tgt<Slot>::value) {
        return slot.ctx_tgt;
    } else {
        return slot.ctx;
    }
}

template <class Slot> auto draft_of(Slot & slot) {
    if constexpr (has_ctx_dft<Slot>::value) {
        return slot.ctx_dft;
    } else {
        return decltype(context_of(slot)){ nullptr };
    }
}

// ------------------------------------------------------------------------------------------------------------- identity

inline void add_stamp(hash & all, const char * path) {
    struct stat facts = {};
    if (::stat(path, &facts) == 0) {
        const int64_t stamp[] = { (int64_t) facts.st_size, (int64_t) facts.st_mtim.tv_sec, (int64_t) facts.st_mtim.tv_nsec };
        all.add(stamp, sizeof(stamp));
    }
}

// The executable and the libraries that it was linked with, at the start: an update may replace the files later.
inline uint64_t build_identity() {
    static const uint64_t identity = [] {
        hash self;
        add_stamp(self, "/proc/self/exe");
        uint64_t sum = self.value();
        ::dl_iterate_phdr(
            [](dl_phdr_info * info, size_t, void * sum) {
                const char * path = info->dlpi_name;
                const char * name = path == nullptr ? nullptr : std::strrchr(path, '/');
                if (name != nullptr && (std::strstr(name, "llama") || std::strstr(name, "ggml") || std::strstr(name, "mtmd"))) {
                    hash library;
                    library.add(std::string(name));
                    add_stamp(library, path);
                    *(uint64_t *) sum += library.value(); // in any order
                }
                return 0;
            },
            &sum);
        return sum;
    }();
    return identity;
}

template <class Context> void add_model(hash & all, Context * context) {
    const auto * model = llama_get_model(context);
    char text[256] = {};
    llama_model_desc(model, text, sizeof(text));
    all.add(std::string(text));
    all.number(llama_model_size(model));
    all.number(llama_model_n_params(model));
    all.number(llama_model_n_swa(model));
}

template <class Params> void add_arguments(hash & all, const Params & params) {
#define LLAMA_WARDEN_ADD(name)                                                                                           \
    if constexpr (has_##name<const Params>::value) {                                                                     \
        all.number(params.name);                                                                                         \
    }
    LLAMA_WARDEN_ADD(swa_full)
    LLAMA_WARDEN_ADD(kv_unified)
    LLAMA_WARDEN_ADD(cache_type_k)
    LLAMA_WARDEN_ADD(cache_type_v)
    LLAMA_WARDEN_ADD(flash_attn)
    LLAMA_WARDEN_ADD(flash_attn_type)
    LLAMA_WARDEN_ADD(rope_freq_base)
    LLAMA_WARDEN_ADD(rope_freq_scale)
    LLAMA_WARDEN_ADD(rope_scaling_type)
    LLAMA_WARDEN_ADD(yarn_ext_factor)
    LLAMA_WARDEN_ADD(yarn_orig_ctx)
#undef LLAMA_WARDEN_ADD
}

template <class Context> void add_context(hash & all, Context * context) {
    all.number(llama_n_ctx(context));
    all.number(llama_n_batch(context));
    all.number(llama_n_ubatch(context));
    all.number(llama_n_seq_max(context));
}

template <class List> void add_adapters(hash & all, const List & adapters, const char * kind) {
    for (const auto & adapter : adapters) {
        all.add(std::string(kind));
        if constexpr (has_path<decltype(adapter)>::value) {
            all.add(adapter.path);
            all.number(adapter.scale);
        } else {
            all.add(adapter.fname);
            all.number(adapter.strength);
        }
    }
}

template <class Slot, class Params> void add_identity(file_header & header, Slot & slot, const Params & params) {
    auto * draft = draft_of(slot);
    hash   model, arguments, tokens;
    add_model(model, context_of(slot));
    if constexpr (has_model<const Params>::value) {
        if constexpr (has_path<decltype(params.model)>::value) {
            add_stamp(model, params.model.path.c_str());
        }
    }
    if constexpr (has_lora_adapters<const Params>::value) {
        add_adapters(model, params.lora_adapters, "lora");
    }
    if constexpr (has_control_vectors<const Params>::value) {
        add_adapters(model, params.control_vectors, "control vector");
    }
    add_arguments(arguments, params);
    add_context(arguments, context_of(slot));
    arguments.number(slot.n_ctx);
    model.number(draft != nullptr);
    if (draft != nullptr) {
        add_model(model, draft);
        add_context(arguments, draft);
    }
    const size_t count = (size_t) slot.prompt.tokens.size();
    for (size_t i = 0; i < count; ++i) {
        tokens.number(slot.prompt.tokens[i]);
    }
    header.build     = build_identity();
    header.model     = model.value();
    header.arguments = arguments.value();
    header.tokens    = tokens.value();
    header.n_tokens  = count;
}

// ---------------------------------------------------------------------------------------------------------------- files

class file {
  public:
    file(const std::string & path, int flags) : number(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {}
    ~file() { close(); }
    file(const file &) = delete;
    file & operator=(const file &) = delete;

    bool is_open() const { return number >= 0; }
    bool close() {
        const int was = number;
        number        = -1;
        return was < 0 || ::close(was) == 0;
    }
    // The size of a regular file, else a negative number.
    int64_t size() const {
        struct stat facts = {};
        return ::fstat(number, &facts) == 0 && S_ISREG(facts.st_mode) ? (int64_t) facts.st_size : -1;
    }
    bool write(const void * data, size_t size) {
        return whole((const char *) data, size, [this](const char * at, size_t part) { return ::write(number, at, part); });
    }
    bool read(void * data, size_t size) {
        return whole((char *) data, size, [this](char * at, size_t part) { return ::read(number, at, part); });
    }
    bool seek(int64_t offset) { return ::lseek(number, (off_t) offset, SEEK_SET) == (off_t) offset; }

  private:
    int number;

    // The system may read or write only a part at a time.
    template <class Byte, class Action> static bool whole(Byte * at, size_t size, Action action) {
        while (size > 0) {
            const ssize_t done = action(at, std::min<size_t>(size, 1u << 30));
            if (done < 0 && errno == EINTR) {
                continue;
            }
            if (done <= 0) {
                return false;
            }
            at += done;
            size -= (size_t) done;
        }
        return true;
    }
};

// Ties the checkpoints to the slot's file: its size, its beginning with the tokens, and its end. 0: no such file.
inline uint64_t slot_file_identity(const std::string & path) {
    constexpr int64_t head = 1 << 20, tail = 1 << 16;
    file              slot(path, O_RDONLY);
    const int64_t     size = slot.is_open() ? slot.size() : -1;
    if (size <= 0) {
        return 0;
    }
    hash all;
    all.number(size);
    blob part((size_t) std::min(size, head));
    if (!slot.read(part.data(), part.size())) {
        return 0;
    }
    all.add(part.data(), part.size());
    part.resize((size_t) std::min(size, tail));
    if (!slot.seek(size - (int64_t) part.size()) || !slot.read(part.data(), part.size())) {
        return 0;
    }
    all.add(part.data(), part.size());
    return all.value() | 1;
}

inline bool write_file(const std::string & path, file_header header, const std::vector<view> & views) {
    const std::string made = path + ".tmp";
    ::unlink(made.c_str());
    file out(made, O_WRONLY | O_CREAT | O_EXCL);
    if (!out.is_open()) {
        return false;
    }
    hash check;
    bool good = true;
    auto put  = [&](const void * data, size_t size) {
        check.add(data, size);
        good = good && out.write(data, size);
    };
    put(&header, sizeof(header));
    for (const view & one : views) {
        put(&one.entry, sizeof(one.entry));
    }
    for (const view & one : views) {
        for (const blob * state : one.states) {
            put(state->data(), state->size());
        }
    }
    const uint64_t value = check.value();
    good = good && out.write(&value, sizeof(value)) && out.close() && ::rename(made.c_str(), path.c_str()) == 0;
    if (!good) {
        ::unlink(made.c_str());
    }
    return good;
}

struct loaded {
    file_entry entry;
    blob       states[3];
};

// Reads a file as a whole. Returns nullptr, or why the file is ignored.
inline const char * read_file(file & in, const file_header & wanted, uint64_t bytes, std::vector<loaded> & all) {
    const int64_t size = in.size();
    file_header   header;
    constexpr uint64_t around = sizeof(file_header) + sizeof(uint64_t);
    if (size < 0) {
        return "it is no regular file";
    }
    if ((uint64_t) size < around) {
        return "it is too short";
    }
    if ((uint64_t) size > bytes) {
        return "it is larger than LLAMA_WARDEN_SLOT_CHECKPOINTS_SIZE_MIB";
    }
    if (!in.read(&header, sizeof(header)) || std::memcmp(header.magic, magic, sizeof(magic)) != 0) {
        return "it is no file of checkpoints";
    }
    if (header.version != version) {
        return "it has another version";
    }
    if (header.size != (uint64_t) size || header.count > most || header.count == 0) {
        return "it is torn";
    }
    if (header.build != wanted.build) {
        return "another build wrote it";
    }
    if (header.model != wanted.model) {
        return "it belongs to another model";
    }
    if (header.arguments != wanted.arguments) {
        return "it was written with other arguments";
    }
    if (header.slot != wanted.slot || header.tokens != wanted.tokens || header.n_tokens != wanted.n_tokens) {
        return "it belongs to another file of a slot";
    }
    uint64_t left = header.size - around;
    if (left / sizeof(file_entry) < header.count) {
        return "it is torn";
    }
    left -= header.count * sizeof(file_entry);
    hash check;
    check.add(&header, sizeof(header));
    all.resize(header.count);
    for (loaded & one : all) {
        if (!in.read(&one.entry, sizeof(one.entry))) {
            return "it is torn";
        }
        check.add(&one.entry, sizeof(one.entry));
    }
    for (loaded & one : all) {
        const uint64_t sizes[] = { one.entry.target, one.entry.draft, one.entry.spec };
        for (int i = 0; i < 3; ++i) {
            if (sizes[i] > left) {
                return "it is torn";
            }
            left -= sizes[i];
            one.states[i].resize((size_t) sizes[i]);
            if (!in.read(one.states[i].data(), one.states[i].size())) {
                return "it is torn";
            }
            check.add(one.states[i].data(), one.states[i].size());
        }
    }
    uint64_t value = 0;
    if (left != 0 || !in.read(&value, sizeof(value)) || value != check.value()) {
        return "its checksum is wrong";
    }
    return nullptr;
}

// ----------------------------------------------------------------------------------------------------- save and restore

inline void passed(const char * mark) {
    // The mark of the hook: a binary that lacks the text does not call it. Never read.
    static volatile std::atomic<const char *> last_passed{ nullptr };
    last_passed.store(mark, std::memory_order_relaxed);
}

// Why this version's checkpoints cannot be kept, or nullptr.
template <class Slot> constexpr const char * unsupported() {
    using prompt = decltype(std::declval<Slot &>().prompt);
    if constexpr (!has_checkpoints<prompt>::value) {
        return "prompts have no checkpoints";
    } else {
        using checkpoint = checkpoint_of<decltype(std::declval<prompt &>().checkpoints)>;
        if constexpr (has_data_tgt<checkpoint>::value || has_data<checkpoint>::value) {
            return members<checkpoint>() == known_members<checkpoint>() ? nullptr : "checkpoints have an unknown member";
        } else {
            return "checkpoints have no state";
        }
    }
}

// The state at the slot's end, of which upstream makes no checkpoint: the file of a slot leaves out the cells that its
// sliding window has passed, and upstream then wants a checkpoint even if the next prompt begins with the whole slot.
template <class Slot, class Params, class T> bool make_end(Slot & slot, const Params & params, uint64_t bytes, T & end) {
    auto *       context = context_of(slot);
    const size_t count   = (size_t) slot.prompt.tokens.size();
    if (draft_of(slot) != nullptr || llama_model_n_swa(llama_get_model(context)) <= 0) {
        return false;
    }
    if constexpr (has_swa_full<const Params>::value) {
        if (params.swa_full) {
            return false;
        }
    }
    auto * memory = llama_get_memory(context);
    end.pos_min   = llama_memory_seq_pos_min(memory, slot.id);
    end.pos_max   = llama_memory_seq_pos_max(memory, slot.id);
    if (end.pos_min < 0 || (int64_t) end.pos_max + 1 != (int64_t) count) {
        return false;
    }
    if constexpr (has_n_tokens<T>::value) {
        end.n_tokens = (int64_t) count;
    }
    const size_t size = llama_state_seq_get_size_ext(context, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (size == 0 || size > bytes) {
        return false;
    }
    auto & state = target_of(end);
    state.resize(size);
    return llama_state_seq_get_data_ext(context, state.data(), size, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == size;
}

template <class Slot, class Params> void write(Slot & slot, const Params & params, const std::string & path) {
    using checkpoint = checkpoint_of<decltype(slot.prompt.checkpoints)>;
    const std::string name = path + suffix;
    const auto &      list = slot.prompt.checkpoints;
    file_header       header = {};
    header.slot = list.empty() ? 0 : slot_file_identity(path);
    if (header.slot == 0) {
        ::unlink(name.c_str());
        return;
    }
    add_identity(header, slot, params);
    constexpr uint64_t around = sizeof(file_header) + sizeof(uint64_t);
    uint64_t           left   = asked().bytes - around;
    std::vector<view>  all, views;
    for (const auto & one : list) {
        all.push_back(view_of(one, std::min((int64_t) one.pos_max + 1, (int64_t) header.n_tokens)));
    }
    checkpoint end{};
    const auto is_end  = [&](const view & one) { return one.entry.n_tokens == (int64_t) header.n_tokens; };
    const bool has_end = std::any_of(all.begin(), all.end(), is_end);
    if (!has_end && make_end(slot, params, left, end)) {
        all.push_back(view_of(end, (int64_t) header.n_tokens));
    }
    // The latest ones first: the next prompt needs them most. In a list, a checkpoint of fewer tokens may follow one of more.
    std::stable_sort(all.begin(), all.end(), [](const view & one, const view & other) {
        return one.entry.n_tokens > other.entry.n_tokens;
    });
    for (const view & one : all) {
        const uint64_t size = sizeof(file_entry) + one.entry.target + one.entry.draft + one.entry.spec;
        if (views.size() >= asked().count || views.size() >= most || size > left) {
            break;
        }
        left -= size;
        views.push_back(one);
    }
    if (views.empty()) {
        ::unlink(name.c_str());
        std::fprintf(stderr, "llama-warden: slot-checkpoints: slot %d: none of %zu checkpoints fits\n", (int) slot.id,
                     all.size());
        return;
    }
    std::reverse(views.begin(), views.end());
    std::memcpy(header.magic, magic, sizeof(header.magic));
    header.version = version;
    header.count   = (uint32_t) views.size();
    header.size    = asked().bytes - left;
    if (!write_file(name, header, views)) {
        const int why = errno;
        ::unlink(name.c_str());
        std::fprintf(stderr, "llama-warden: slot-checkpoints: slot %d: cannot write %s: %s\n", (int) slot.id, name.c_str(),
                     std::strerror(why));
        return;
    }
    std::fprintf(stderr, "llama-warden: slot-checkpoints: slot %d: %zu checkpoints saved, %llu bytes, %zu left out\n",
                 (int) slot.id, views.size(), (unsigned long long) header.size, all.size() - views.size());
}

template <class Slot> const char * check_entries(Slot & slot, const std::vector<loaded> & all) {
    const auto last      = llama_memory_seq_pos_max(llama_get_memory(context_of(slot)), slot.id);
    const bool has_draft = draft_of(slot) != nullptr;
    int64_t    before    = 0;
    for (const loaded & one : all) {
        const file_entry & entry = one.entry;
        if (entry.pos_min < 0 || entry.pos_max < entry.pos_min || entry.pos_max > last || entry.n_tokens < before ||
            entry.n_tokens > (int64_t) slot.prompt.tokens.size() || entry.target == 0 || (entry.draft > 0 && !has_draft)) {
            return "its checkpoints are not of this slot";
        }
        before = entry.n_tokens;
    }
    return nullptr;
}

template <class Slot, class Params> void read(Slot & slot, const Params & params, const std::string & path) {
    using checkpoint = checkpoint_of<decltype(slot.prompt.checkpoints)>;
    const std::string name = path + suffix;
    slot.prompt.checkpoints.clear(); // as upstream; older versions kept those of the slot's former prompt
    file in(name, O_RDONLY);
    if (!in.is_open() && errno == ENOENT) {
        return;
    }
    file_header         header = {};
    std::vector<loaded> all;
    const char *        why = "it cannot be opened";
    if (in.is_open()) {
        header.slot = slot_file_identity(path);
        add_identity(header, slot, params);
        why = read_file(in, header, asked().bytes, all);
    }
    if (why == nullptr) {
        why = check_entries(slot, all);
    }
    if (why != nullptr) {
        std::fprintf(stderr, "llama-warden: slot-checkpoints: slot %d: %s is ignored: %s\n", (int) slot.id, name.c_str(),
                     why);
        return;
    }
    decltype(slot.prompt.checkpoints) restored;
    for (loaded & one : all) {
        checkpoint next{};
        next.pos_min    = one.entry.pos_min;
        next.pos_max    = one.entry.pos_max;
        target_of(next) = std::move(one.states[0]);
        if constexpr (has_n_tokens<checkpoint>::value) {
            next.n_tokens = one.entry.n_tokens;
        }
        if constexpr (has_id_task<checkpoint>::value) {
            next.id_task = -1;
        }
        if constexpr (has_data_dft<checkpoint>::value) {
            next.data_dft = std::move(one.states[1]);
        }
        if constexpr (has_data_spec<checkpoint>::value) {
            next.data_spec = std::move(one.states[2]);
        }
        restored.push_back(std::move(next));
    }
    slot.prompt.checkpoints = std::move(restored);
    std::fprintf(stderr, "llama-warden: slot-checkpoints: slot %d: %zu checkpoints restored\n", (int) slot.id, all.size());
}

// At load, so that the start-up log has the line and the build is known before an update replaces it.
[[maybe_unused]] static const bool announced = asked().on && build_identity() != 0;

#else
inline void passed(const char *) {}
[[maybe_unused]] static const bool announced = asked().on;
#endif

} // namespace checkpoints

#if defined(LLAMA_WARDEN_CHECKPOINTS)
template <class Slot, class Params, class Action>
void with_checkpoints(Slot & slot, const Params & params, const std::string & path, Action action) {
    using namespace checkpoints;
    if (!asked().on) {
        return;
    }
    constexpr const char * why = unsupported<Slot>();
    if constexpr (why != nullptr) {
        std::fprintf(stderr, "llama-warden: slot-checkpoints is ignored: in this version %s\n", why);
    } else {
        try {
            action(slot, params, path);
        } catch (const std::exception & wrong) { // no memory
            slot.prompt.checkpoints.clear();
            ::unlink((path + suffix).c_str());
            std::fprintf(stderr, "llama-warden: slot-checkpoints: slot %d: %s\n", (int) slot.id, wrong.what());
        }
    }
}
#endif

// Called when the slot's file has been written.
template <class Slot, class Params>
void save_checkpoints(Slot & slot, const Params & params, const std::string & path, const char * mark) {
    checkpoints::passed(mark);
#if defined(LLAMA_WARDEN_CHECKPOINTS)
    with_checkpoints(slot, params, path, [](auto & slot, const auto & params, const std::string & path) {
        checkpoints::write(slot, params, path);
    });
#endif
}

// Called when the slot's file has been read, and the slot has its tokens.
template <class Slot, class Params>
void restore_checkpoints(Slot & slot, const Params & params, const std::string & path, const char * mark) {
    checkpoints::passed(mark);
#if defined(LLAMA_WARDEN_CHECKPOINTS)
    with_checkpoints(slot, params, path, [](auto & slot, const auto & params, const std::string & path) {
        checkpoints::read(slot, params, path);
    });
#endif
}

} // namespace llama_warden
