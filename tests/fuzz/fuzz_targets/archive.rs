//! The reader of source archives finds llama.cpp in any bytes, or says why not. Half of the inputs become
//! contents of a `.tar.gz`, because changed compressed bytes can hardly be unpacked.
#![no_main]

mod memory;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use tokio_util::sync::CancellationToken;
use warden_builder::source::Source;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = memory::path("");
    std::fs::create_dir_all(&folder).expect("a folder in memory");
    folder
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((how, bytes)) = bytes.split_first() else { return };
    let (path, cache) = (FOLDER.join("source"), FOLDER.join("cache"));
    if how % 2 == 0 {
        let mut packed = GzEncoder::new(Vec::new(), Compression::none());
        packed.write_all(bytes).expect("into memory");
        std::fs::write(&path, packed.finish().expect("into memory")).expect("a file in memory");
    } else {
        std::fs::write(&path, bytes).expect("a file in memory");
    }
    let cancel = CancellationToken::new();
    let read = Source::at(&path).and_then(|source| source.tree(&cache, &cancel));
    if let Err(problem) = read {
        assert!(!problem.to_string().is_empty());
    }
    drop(std::fs::remove_dir_all(&cache));
});
