//! Any text as a configuration file is parsed, or every problem has a place and a reason. Nothing that it
//! names is opened or run.
#![no_main]

mod memory;

use std::path::PathBuf;
use std::sync::LazyLock;

use warden_config::source::layers::{ConfigSources, load_config};

static FILE: LazyLock<PathBuf> = LazyLock::new(|| memory::path(".toml"));

libfuzzer_sys::fuzz_target!(|text: &str| {
    std::fs::write(&*FILE, text).expect("a file in memory");
    if let Err(problems) =
        load_config(ConfigSources { file: Some(FILE.clone()), env: Vec::new(), flags: Vec::new(), memory: 1 << 34 })
    {
        assert!(!problems.0.is_empty());
        for problem in &problems.0 {
            let place = problem.place.to_string();
            assert!(place.contains("warden-fuzz-") || place == "configuration", "{problem}");
            assert!(!problem.message.is_empty());
        }
    }
});
