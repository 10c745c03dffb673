//! Renamed flags of llama-server, with the build of each change, from llama.cpp's history. Flags whose old
//! name is still an alias are included, because old builds do not know the new name.

/// A name of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagSpelling {
    /// Spellings of the name; the first spelling known to the binary is used.
    pub names: &'static [&'static str],
    /// Word after the flag that belongs to its name; `None` if a value or nothing follows.
    pub value: Option<&'static str>,
}

/// A flag with two names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenamedFlag {
    /// Name in older builds.
    pub old: FlagSpelling,
    /// Name in newer builds.
    pub new: FlagSpelling,
    /// Number of the first build with the new name.
    pub since: u32,
    /// Number of a build that lacks the old name; `None` if it is still an alias.
    pub gone: Option<u32>,
}

const fn flag_spelling(names: &'static [&'static str]) -> FlagSpelling {
    FlagSpelling { names, value: None }
}

/// Describes a flag that was replaced by `--load-mode VALUE`.
const fn load_mode_flag(old: &'static [&'static str], value: &'static str) -> RenamedFlag {
    let new = FlagSpelling { names: &["--load-mode", "-lm"], value: Some(value) };
    RenamedFlag { old: flag_spelling(old), new, since: 10_105, gone: Some(10_884) }
}

/// Describes a flag of the draft model whose old name remains an alias.
const fn draft_flag(old: &'static [&'static str], new: &'static [&'static str]) -> RenamedFlag {
    RenamedFlag { old: flag_spelling(old), new: flag_spelling(new), since: 8955, gone: None }
}

/// All renamed flags.
pub const RENAMED_FLAGS: &[RenamedFlag] = &[
    load_mode_flag(&["--no-mmap"], "none"),
    load_mode_flag(&["--mmap"], "mmap"),
    load_mode_flag(&["--mlock"], "mlock"),
    load_mode_flag(&["-dio", "--direct-io"], "dio"),
    load_mode_flag(&["-ndio", "--no-direct-io"], "none"),
    RenamedFlag {
        gone: Some(8955),
        ..draft_flag(&["--draft-max", "--draft", "--draft-n"], &["--spec-draft-n-max"])
    },
    RenamedFlag {
        gone: Some(8955),
        ..draft_flag(&["--draft-min", "--draft-n-min"], &["--spec-draft-n-min"])
    },
    draft_flag(&["--model-draft", "-md"], &["--spec-draft-model"]),
    draft_flag(&["--hf-repo-draft", "-hfd", "-hfrd"], &["--spec-draft-hf"]),
    draft_flag(&["--gpu-layers-draft", "--n-gpu-layers-draft", "-ngld"], &["--spec-draft-ngl"]),
    draft_flag(&["--device-draft", "-devd"], &["--spec-draft-device"]),
    draft_flag(&["--threads-draft", "-td"], &["--spec-draft-threads"]),
    draft_flag(&["--threads-batch-draft", "-tbd"], &["--spec-draft-threads-batch"]),
    draft_flag(&["--draft-p-min"], &["--spec-draft-p-min"]),
    draft_flag(&["--draft-p-split"], &["--spec-draft-p-split"]),
    draft_flag(&["--cache-type-k-draft", "-ctkd"], &["--spec-draft-type-k"]),
    draft_flag(&["--cache-type-v-draft", "-ctvd"], &["--spec-draft-type-v"]),
    draft_flag(&["--override-tensor-draft", "-otd"], &["--spec-draft-override-tensor"]),
    draft_flag(&["--cpu-moe-draft", "-cmoed"], &["--spec-draft-cpu-moe"]),
    draft_flag(&["--n-cpu-moe-draft", "-ncmoed"], &["--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"]),
    RenamedFlag {
        old: flag_spelling(&["--checkpoint-every-n-tokens", "-cpent"]),
        new: flag_spelling(&["--checkpoint-min-step", "-cms"]),
        since: 9310,
        gone: Some(9310),
    },
    RenamedFlag { old: flag_spelling(&["--webui"]), new: flag_spelling(&["--ui"]), since: 9174, gone: None },
    RenamedFlag {
        old: flag_spelling(&["--no-webui"]),
        new: flag_spelling(&["--no-ui"]),
        since: 9174,
        gone: None,
    },
];
