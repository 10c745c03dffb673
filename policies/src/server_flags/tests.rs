//! Parses help texts of old and new builds.

use super::*;

/// A help text with the entries of all tests, and the least number of others.
fn help(own: &str) -> String {
    let filler = (0..FEWEST_FLAGS).fold(String::new(), |text, n| {
        text + &format!("--flag-{n} N                              a number\n")
    });
    format!("----- common params -----\n\n{own}\n{filler}")
}

const OLD: &str = "\
--mlock                                 force system to keep model in RAM rather than swapping or compressing
                                        (env: LLAMA_ARG_MLOCK)
--mmap, --no-mmap                       whether to memory-map model. (if mmap disabled, slower load but may
                                        reduce pageouts if not using mlock) (default: enabled)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-sm,   --split-mode {none,layer,row}    how to split the model across multiple GPUs
  -np N, --parallel N                   number of slots
--draft, --draft-n, --draft-max N       number of tokens to draft for speculative decoding (default: 16)
-md,   --model-draft FNAME              draft model for speculative decoding (default: unused)";

const NEW: &str = "\
-lm,   --load-mode MODE                 model loading mode (default: auto)
                                        - none: no special loading mode, as
                                        --no-mmap was
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
--spec-draft-n-max N                    number of tokens to draft for speculative decoding (default: 16)
--spec-draft-override-tensor, -otd, --override-tensor-draft <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type for draft model
-md,   --spec-draft-model, --model-draft FNAME
                                        draft model for speculative decoding (default: unused)";

fn list(own: &str) -> FlagList {
    FlagList::parse(&help(own)).unwrap()
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn translated(own: &str, args: &str) -> String {
    list(own).translate(&words(args)).words.join(" ")
}

#[test]
fn flags_of_a_help_are_known_and_those_in_its_descriptions_are_not() {
    let new = list(NEW);
    for flag in ["-lm", "--load-mode", "--load_mode", "-fa", "-md", "--spec-draft-model", "-otd", "--flag-7"]
    {
        assert!(new.knows(flag), "{flag}");
    }
    for flag in ["--no-mmap", "--draft-max", "--draft", "--spec-ngram-mod-n-max", "-", "--", "--mlock"] {
        assert!(!new.knows(flag), "{flag}");
    }
    let old = list(OLD);
    assert!(
        ["--mmap", "--no-mmap", "--no_mmap", "-np", "--parallel", "--draft"]
            .iter()
            .all(|flag| old.knows(flag))
    );
    assert_eq!(FlagList::parse("-h, --help, --usage     print usage and exit"), None, "no llama-server");
}

#[test]
fn a_listed_value_is_checked_and_a_placeholder_takes_any_word() {
    let old = list(OLD);
    assert!(old.takes("-fa", "off") && old.takes("--split-mode", "row") && old.takes("-np", "4"));
    assert!(!old.takes("-fa", "1") && !old.takes("-sm", "tensor") && !old.takes("--mlock", "on"));
}

#[test]
fn renamed_flags_are_written_as_the_binary_knows_them_in_both_directions() {
    for (old, new) in [
        ("-c 1 --no-mmap -np 2", "-c 1 --load-mode none -np 2"),
        ("--mmap --mlock", "--load-mode mmap --load-mode mlock"),
        ("--draft-max 8", "--spec-draft-n-max 8"),
    ] {
        assert_eq!(translated(NEW, old), new);
        assert_eq!(translated(OLD, new), old);
        assert_eq!((translated(OLD, old), translated(NEW, new)), (old.to_owned(), new.to_owned()));
    }
    assert_eq!(translated(NEW, "--no_mmap -dio"), "--load-mode none --load-mode dio");
    assert_eq!(translated(OLD, "--spec-draft-model x.gguf"), "--model-draft x.gguf");
    // The flag has no other name, or its value has none.
    assert_eq!(translated(OLD, "--load-mode mmap+mlock -zz"), "--load-mode mmap+mlock -zz");
}

#[test]
fn the_hint_for_a_renamed_flag_names_the_other_spelling_and_the_build() {
    let (old, new) = (list(OLD), list(NEW));
    let told: Vec<Option<String>> = vec![
        new.renamed_hint("--no-mmap", None),
        new.renamed_hint("--draft-max", Some("8")),
        old.renamed_hint("--load-mode", Some("none")),
        old.renamed_hint("--spec-draft-model", Some("x")),
        new.renamed_hint("--zzz", None),
    ];
    insta::assert_debug_snapshot!(told);
}

#[test]
fn every_name_is_in_one_entry_only_so_that_a_translation_is_the_only_one() {
    let mut seen = BTreeSet::new();
    for one in RENAMED_FLAGS {
        for name in one.old.names {
            assert!(is_flag(name) && seen.insert((*name).to_owned()), "{name}");
        }
        let value = one.new.value.unwrap_or_default();
        for name in one.new.names {
            // Two old flags may have become one; the first one is used.
            let fresh = seen.insert(format!("{name} {value}"));
            assert!(is_flag(name) && (fresh || value == "none"), "{name} {value}");
        }
        assert!(one.gone.is_none_or(|gone| gone >= one.since), "{one:?}");
    }
}

#[test]
fn variables_of_a_help_are_known_those_of_removed_flags_are_not_and_others_are_believed() {
    let gone = "--old N   the argument has been removed. use --new\n          (env: LLAMA_ARG_OLD)";
    let known = list(&format!("{OLD}\n--mmap2, --no-mmap2    map it (env: LLAMA_ARG_MMAP2)\n{gone}"));
    for name in ["LLAMA_ARG_MLOCK", "LLAMA_ARG_NO_MMAP2", "HF_TOKEN", "GGML_CUDA_P2P"] {
        assert!(known.knows_variable(name), "{name}");
    }
    for name in ["LLAMA_ARG_MLOC", "LLAMA_ARG_NO_MLOC", "LLAMA_ARG_OLD"] {
        assert!(!known.knows_variable(name), "{name}");
    }
    assert!(list(NEW).knows_variable("LLAMA_ARG_ANY"), "this help names none");
    assert_eq!(known.variables().collect::<Vec<_>>(), ["LLAMA_ARG_MLOCK", "LLAMA_ARG_MMAP2"]);
}
