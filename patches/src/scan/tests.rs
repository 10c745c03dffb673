//! Containers that the scanner finds in invented code, those it must not find, and confusing text.

use proptest::prelude::*;

use super::ContainerKind;
use super::*;

fn container(kind: ContainerKind, name: &str) -> CodeContainer {
    CodeContainer { kind, name: name.to_owned() }
}

fn all(text: &str, kind: ContainerKind, name: &str) -> Vec<String> {
    let source = ScannedSource::new(text.as_bytes().to_vec());
    match source.find(&container(kind, name)) {
        ContainerSearch::All(found) => {
            found.iter().map(|found| text[found.start..found.end].to_owned()).collect()
        }
        ContainerSearch::Unsure { line, why } => vec![format!("unsure in line {line}: {why}")],
    }
}

fn functions(text: &str, name: &str) -> Vec<String> {
    all(text, ContainerKind::Function, name)
}

fn structs(text: &str, name: &str) -> Vec<String> {
    all(text, ContainerKind::Struct, name)
}

fn code(text: &str) -> String {
    ScannedSource::new(text.as_bytes().to_vec()).code().to_owned()
}

#[test]
fn comments_and_strings_are_blanked_and_everything_else_stays() {
    for (text, masked) in [
        ("a; // b { c\nd;", "a;         \nd;"),
        ("a /* { \n } */ b", "a      \n      b"),
        ("f(\"{\\\"\", '{', L'\\'');", "f(\"   \", ' ', L'  ');"),
        ("s = R\"x({ )\" })x\"; t", "s = R\"          \"; t"),
        ("s = u8R\"(}\n{)\" + x;", "s = u8R\"  \n  \" + x;"),
        ("n = 5'000'000 + 'a';", "n = 5'000'000 + ' ';"),
        ("n = 0xAB'CDu; c = 'x';", "n = 0xAB'CDu; c = ' ';"),
        ("// a \\\n b {\nc", "      \n    \nc"),
        ("#include \"a.h\" // b\n", "#include \"a.h\"     \n"),
        ("#error don't {\nint a;", "#error don'   \nint a;"),
        ("é = \"é\";", "?? = \"  \";"),
        ("a\r\n// b\r\nc", "a\r\n    \r\nc"),
        ("x /* open", "x        "),
        ("x = \"open\ny", "x = \"    \ny"),
        ("FOOR\"(a\" b)\"", "FOOR\"  \" b)\""),
    ] {
        assert_eq!(code(text), masked, "{text:?}");
    }
}

#[test]
fn a_line_that_we_placed_is_no_code_and_another_ones_comment_is_only_a_comment() {
    assert_eq!(code("a;\n  call(); // llama-warden:x/y\nb;"), format!("a;\n{}\nb;", " ".repeat(29)));
    assert_eq!(code("#include \"w.h\" // llama-warden:x/y\nb;"), format!("{}\nb;", " ".repeat(34)));
    assert_eq!(code("call(); // llama-warden: fine"), format!("call(); {}", " ".repeat(21)));
}

#[test]
fn definitions_are_found_and_declarations_and_calls_are_not() {
    let text = "int f(int a);\nstatic int g() { return f(1); }\nint f(int a) {\n  if (a) { return f(0); }\n  return a;\n}\n";
    assert_eq!(functions(text, "f"), ["int f(int a) {\n  if (a) { return f(0); }\n  return a;\n}"]);
    assert_eq!(functions(text, "if"), Vec::<String>::new());
}

#[test]
fn a_function_is_found_by_the_end_of_its_full_name_wherever_it_is_written() {
    let text = "namespace n { struct a { int b() { return 1; } ~a() { } }; }\nint a::c() const { return 2; }\nvoid c() { }\n";
    assert_eq!(functions(text, "a::b"), ["int b() { return 1; }"]);
    assert_eq!(functions(text, "n::a::b").len(), 1);
    assert_eq!(functions(text, "b").len(), 1);
    assert_eq!(functions(text, "a::~a"), ["~a() { }"]);
    assert_eq!(functions(text, "a::c"), ["int a::c() const { return 2; }"]);
    assert_eq!(functions(text, "c").len(), 2);
    assert_eq!(functions(text, "x::b").len(), 0);
}

#[test]
fn heads_with_prefixes_templates_and_initialisers_are_found_whole() {
    for (text, name) in [
        ("GGML_CALL static enum st f(ctx * c, int n) { x(); }", "f"),
        ("template <int n, typename T = a<b>>\nstatic __global__ void f(T x) { }", "f"),
        ("pool::pool(int n) : a(n), b{1, {2}}, c(g({3})) { run(); }", "pool::pool"),
        ("pool::~pool() { }", "pool::~pool"),
        ("auto f(int a = 1, v b = {}) -> s { return {}; }", "f"),
    ] {
        assert_eq!(functions(text, name), [text], "{text}");
        let behind = format!("int before = 1;\n{text}\nint after = 2;\n");
        assert_eq!(functions(&behind, name), [text], "{text}");
    }
}

#[test]
fn a_struct_is_its_definition_only() {
    let text = "struct a;\nstruct a * p;\nstruct a * f(struct a * x) { return x; }\nstruct a : base<int> {\n  struct in { int n; };\n  int v = { 1 };\n};\nstatic struct a table = { 1 };\n";
    assert_eq!(structs(text, "a"), ["struct a : base<int> {\n  struct in { int n; };\n  int v = { 1 };\n}"]);
    assert_eq!(structs(text, "a::in"), ["struct in { int n; }"]);
    assert_eq!(structs("typedef struct a { int n; } a;", "a"), ["typedef struct a { int n; }"]);
}

#[test]
fn code_in_comments_strings_macros_and_if_0_is_not_found() {
    for text in [
        "/* void f() { } */",
        "// void f() { }\n",
        "const char * s = \"void f() { }\";",
        "#define F \\\n void f() { }\n",
        "#if 0\nvoid f() { }\n#endif\n",
        "#if 1\n#else\nvoid f() { }\n#endif\n",
        "#if 0\n#if X\nvoid f() {\n#endif\n#endif\n",
    ] {
        assert_eq!(functions(text, "f"), Vec::<String>::new(), "{text}");
    }
    let text = "#if 0\nvoid f() { old\n#else\nvoid f() {\n#endif\n}\n";
    assert_eq!(functions(text, "f"), ["void f() {\n#endif\n}"]);
}

#[test]
fn alternatives_that_agree_about_braces_are_read() {
    let text = "#ifdef A\nvoid f(int a) {\n#else\nvoid f() {\n#endif\n  x();\n}\nvoid g() { }\n";
    assert_eq!(functions(text, "f").len(), 1);
    assert_eq!(functions(text, "g"), ["void g() { }"]);
    let both = "#ifdef A\nvoid f() { a(); }\n#else\nvoid f() { b(); }\n#endif\n";
    assert_eq!(functions(both, "f"), ["void f() { a(); }", "void f() { b(); }"]);
}

#[test]
fn half_a_block_in_a_conditional_is_read_where_the_other_half_matches() {
    let text = "void f() {\n#ifdef A\n  if (a) {\n#endif\n  x();\n#ifdef A\n  }\n#endif\n}\nvoid g() { }\n";
    assert_eq!(functions(text, "g"), ["void g() { }"]);
    assert_eq!(functions(text, "f").len(), 1);
    assert!(functions(text, "f")[0].ends_with("#endif\n}"));
}

#[test]
fn braces_that_depend_on_conditionals_are_refused_and_name_the_lines() {
    let text = "void f() {\n#ifdef A\n  if (a) {\n#endif\n  x();\n}\nvoid g() { }\n";
    for name in ["f", "g"] {
        let found = functions(text, name);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("unsure in line"), "{found:?}");
    }
    assert!(functions(text, "f")[0].contains("2-4"), "{:?}", functions(text, "f"));
}

#[test]
fn a_file_out_of_balance_is_refused() {
    for text in [
        "void f() { }\n}\nvoid g() { }",
        "void f() { }\nvoid g() { {",
        "#if A\nvoid f() { }\n",
        "#endif\nvoid f() { }",
    ] {
        assert!(functions(text, "f")[0].starts_with("unsure in line"), "{text}");
    }
}

#[test]
fn lines_are_counted_from_one() {
    let source = ScannedSource::new(b"a\nb\n\nc".to_vec());
    assert_eq!([0, 1, 2, 4, 5].map(|at| source.line(at)), [1, 1, 2, 3, 4]);
    assert_eq!(source.line_start(5), 5);
    assert_eq!(source.next_line(0), Some(2));
    assert_eq!(source.next_line(5), None);
}

/// Text with many constructs that confuse scanners.
fn confusing() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "{",
        "}",
        "(",
        ")",
        "\"",
        "'",
        "/*",
        "*/",
        "//",
        "\\",
        "\n",
        "\r\n",
        "\\\n",
        "#if 0\n",
        "#ifdef A\n",
        "#else\n",
        "#elif B\n",
        "#endif\n",
        "#define X {\n",
        "R\"(",
        ")\"",
        "R\"a(",
        ")a\"",
        "1'0",
        "struct s ",
        "void f() ",
        "a::b()",
        ": x{",
        ", ",
        ";",
        "<",
        ">",
        "template <",
        "namespace ",
        "operator=",
        "~",
        "::",
        "=",
        "é",
        " ",
        "// llama-warden:a/b",
        "public:",
        "extern \"C\" ",
    ]);
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

fn sound(raw: &[u8]) -> Result<(), TestCaseError> {
    let source = ScannedSource::new(raw.to_vec());
    prop_assert_eq!(source.code().len(), raw.len());
    for (masked, byte) in source.code().bytes().zip(raw) {
        prop_assert_eq!(masked == b'\n', *byte == b'\n');
        prop_assert!(masked == *byte || masked == b' ' || (masked == b'?' && !byte.is_ascii()));
    }
    for (kind, name) in
        [(ContainerKind::Function, "f"), (ContainerKind::Function, "a::b"), (ContainerKind::Struct, "s")]
    {
        if let ContainerSearch::All(found) = source.find(&container(kind, name)) {
            for found in found {
                let text = source.structure().get(found.open..found.end).unwrap_or_default();
                prop_assert_eq!((text.first(), text.last()), (Some(&b'{'), Some(&b'}')));
                let mut depth = 0;
                for (at, byte) in text.iter().enumerate() {
                    depth += match byte {
                        b'{' => 1,
                        b'}' => -1,
                        _ => 0,
                    };
                    prop_assert_eq!(depth == 0, at + 1 == text.len());
                }
                prop_assert!(found.start <= found.name && found.name <= found.open);
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn masking_keeps_length_and_lines_and_what_is_found_is_balanced(text in confusing()) {
        sound(text.as_bytes())?;
    }

    #[test]
    fn no_bytes_make_a_scan_panic(raw in prop::collection::vec(any::<u8>(), 0..400)) {
        sound(&raw)?;
    }

    #[test]
    fn no_text_makes_a_scan_panic(text in any::<String>()) {
        sound(text.as_bytes())?;
    }

    #[test]
    fn a_definition_between_sound_neighbours_is_found_whole(
        before in prop::sample::select(vec!["", "int a;\n", "struct s { int n; };\n", "#if A\nvoid g() { }\n#endif\n", "/* } */\n"]),
        body in prop::sample::select(vec!["", "if (a) { b(); }", "s = \"}\";", "// }\n", "k<<<a, b>>>(c);", "\n#ifdef A\n x();\n#endif\n"]),
    ) {
        let definition = format!("static void f(int a) {{ {body} }}");
        let text = format!("{before}{definition}\nvoid h() {{ f(1); }}\n");
        prop_assert_eq!(functions(&text, "f"), vec![definition]);
    }
}
