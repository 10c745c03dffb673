//! Heads of functions and structs, and text that only looks like one.

use super::*;

fn function(head: &str) -> String {
    match classify(head) {
        Opens::Function { name, .. } => name.join("::"),
        other => format!("{other:?}"),
    }
}

fn structure(head: &str) -> String {
    match classify(head) {
        Opens::Struct { name, .. } => name.join("::"),
        other => format!("{other:?}"),
    }
}

#[test]
fn heads_of_functions_are_named() {
    for (head, name) in [
        ("void f()", "f"),
        ("GGML_CALL static enum status run(int a, int (*b)(int))", "run"),
        ("template <typename T, int N = (1 > 0)> static T pick(T a)", "pick"),
        ("pool::~pool()", "pool::~pool"),
        ("~pool()", "~pool"),
        ("pool::pool(int n) : a(n), b{ }", "pool::pool"),
        ("std::unique_ptr<base> a::b<int>::make(const x & y) const noexcept(true)", "a::b::make"),
        ("__global__ void __launch_bounds__(256, 2) kernel(float * x)", "kernel"),
        ("EXPORT(x) static void real(int a)", "real"),
        ("struct node * next(struct node * n)", "next"),
        ("bool operator==(const a & b) const", "operator=="),
        ("a & a::operator=(const a & b)", "a::operator="),
        ("void a::operator()(int n)", "a::operator()"),
        ("public: int get() const override", "get"),
        ("auto f(int a) -> std::vector<int>", "f"),
        ("__attribute__((cold)) void slow(int a)", "slow"),
        ("void f(std::function<void()> g = { })", "f"),
    ] {
        assert_eq!(function(head), name, "{head}");
    }
}

#[test]
fn heads_of_structs_are_named() {
    for (head, name) in [
        ("struct a", "a"),
        ("class a final : public b<int>, private c", "a"),
        ("typedef struct a", "a"),
        ("template <typename T> struct a<T *>", "a"),
        ("struct alignas(16) a", "a"),
        ("struct outer::inner", "outer::inner"),
        ("union u", "u"),
        ("public: struct a : b", "a"),
    ] {
        assert_eq!(structure(head), name, "{head}");
    }
}

#[test]
fn what_defines_neither_is_told_apart() {
    for head in [
        "static const int table[] =",
        "struct a b =",
        "enum class e : int",
        "enum e",
        "auto f = [](int a)",
        "if (a)",
        "typedef struct",
        "",
        "do",
    ] {
        assert_eq!(classify(head), Opens::Other, "{head}");
    }
    assert_eq!(classify("pool::pool(int n) : a"), Opens::Member);
    assert_eq!(classify("pool::pool(int n) : a(n), b<int>"), Opens::Member);
    assert_eq!(classify("extern \" \""), Opens::Scope { name: vec![] });
    assert_eq!(classify("namespace a::b"), Opens::Scope { name: vec!["a".into(), "b".into()] });
    assert_eq!(classify("inline namespace v1"), Opens::Scope { name: vec!["v1".into()] });
    assert_eq!(classify("namespace"), Opens::Scope { name: vec![] });
}
