//! Any text as a configuration file: it is read, or every problem says where it is and what. Nothing that it names is
//! opened or run: resolving it is not part of this.
//!
//! The product is a program without a library, so the files that read a configuration are taken in here as they stand.
#![no_main]
#![allow(dead_code, unused_imports, unexpected_cfgs)]

#[path = "../../../proxy/app/src/advice.rs"]
mod advice;
#[path = "../../../proxy/app/src/child_lines.rs"]
mod child_lines;
#[path = "../../../proxy/app/src/config/mod.rs"]
mod config;
#[path = "../../../proxy/app/src/exit.rs"]
mod exit;
#[path = "../../../proxy/app/src/journal.rs"]
mod journal;
#[path = "../../../proxy/app/src/log_writer.rs"]
mod log_writer;
#[path = "../../../proxy/app/src/logging.rs"]
mod logging;
#[path = "../../../proxy/app/src/out.rs"]
mod out;
#[cfg(test)]
#[path = "../../../proxy/app/src/printed.rs"]
mod printed;
#[path = "../../../proxy/app/src/sync.rs"]
mod sync;

mod memory;

use std::path::PathBuf;
use std::sync::LazyLock;

use config::source::layers::{Sources, load};

static FILE: LazyLock<PathBuf> = LazyLock::new(|| memory::path(".toml"));

libfuzzer_sys::fuzz_target!(|text: &str| {
    std::fs::write(&*FILE, text).expect("a file in memory");
    if let Err(problems) =
        load(Sources { file: Some(FILE.clone()), env: Vec::new(), flags: Vec::new(), memory: 1 << 34 })
    {
        assert!(!problems.0.is_empty());
        for problem in &problems.0 {
            let place = problem.place.to_string();
            assert!(place.contains("warden-fuzz-") || place == "configuration", "{problem}");
            assert!(!problem.message.is_empty());
        }
    }
});
