//! Renamed flags of llama-server, with the build of each change, from llama.cpp's history. Flags whose old
//! name is still an alias are included, because old builds do not know the new one.

/// A flag under one of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagSpelling {
    /// Spellings; the first known to the binary is used.
    pub names: &'static [&'static str],
    /// Following word that belongs to the name; `None` if the next word is a value, or there is none.
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
    /// Number of a build without the old name, if it was removed.
    pub gone: Option<u32>,
}

const fn plain(names: &'static [&'static str]) -> FlagSpelling {
    FlagSpelling { names, value: None }
}

/// `--load-mode VALUE`, which replaced separate flags.
const fn load_mode(old: &'static [&'static str], value: &'static str) -> RenamedFlag {
    let new = FlagSpelling { names: &["--load-mode", "-lm"], value: Some(value) };
    RenamedFlag { old: plain(old), new, since: 10_105, gone: Some(10_884) }
}

/// A flag of the draft model, whose old name remains an alias.
const fn draft(old: &'static [&'static str], new: &'static [&'static str]) -> RenamedFlag {
    RenamedFlag { old: plain(old), new: plain(new), since: 8955, gone: None }
}

/// All renamed flags.
pub const RENAMED_FLAGS: &[RenamedFlag] = &[
    load_mode(&["--no-mmap"], "none"),
    load_mode(&["--mmap"], "mmap"),
    load_mode(&["--mlock"], "mlock"),
    load_mode(&["-dio", "--direct-io"], "dio"),
    load_mode(&["-ndio", "--no-direct-io"], "none"),
    RenamedFlag {
        gone: Some(8955),
        ..draft(&["--draft-max", "--draft", "--draft-n"], &["--spec-draft-n-max"])
    },
    RenamedFlag { gone: Some(8955), ..draft(&["--draft-min", "--draft-n-min"], &["--spec-draft-n-min"]) },
    draft(&["--model-draft", "-md"], &["--spec-draft-model"]),
    draft(&["--hf-repo-draft", "-hfd", "-hfrd"], &["--spec-draft-hf"]),
    draft(&["--gpu-layers-draft", "--n-gpu-layers-draft", "-ngld"], &["--spec-draft-ngl"]),
    draft(&["--device-draft", "-devd"], &["--spec-draft-device"]),
    draft(&["--threads-draft", "-td"], &["--spec-draft-threads"]),
    draft(&["--threads-batch-draft", "-tbd"], &["--spec-draft-threads-batch"]),
    draft(&["--draft-p-min"], &["--spec-draft-p-min"]),
    draft(&["--draft-p-split"], &["--spec-draft-p-split"]),
    draft(&["--cache-type-k-draft", "-ctkd"], &["--spec-draft-type-k"]),
    draft(&["--cache-type-v-draft", "-ctvd"], &["--spec-draft-type-v"]),
    draft(&["--override-tensor-draft", "-otd"], &["--spec-draft-override-tensor"]),
    draft(&["--cpu-moe-draft", "-cmoed"], &["--spec-draft-cpu-moe"]),
    draft(&["--n-cpu-moe-draft", "-ncmoed"], &["--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"]),
    RenamedFlag {
        old: plain(&["--checkpoint-every-n-tokens", "-cpent"]),
        new: plain(&["--checkpoint-min-step", "-cms"]),
        since: 9310,
        gone: Some(9310),
    },
    RenamedFlag { old: plain(&["--webui"]), new: plain(&["--ui"]), since: 9174, gone: None },
    RenamedFlag { old: plain(&["--no-webui"]), new: plain(&["--no-ui"]), since: 9174, gone: None },
];
