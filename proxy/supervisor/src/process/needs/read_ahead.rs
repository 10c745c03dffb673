//! Reads a model's files into the page cache while the old process serves, so that the next start does not
//! wait for the disk.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tokio::time::Instant;

use crate::spec::ServerCommand;

/// Bytes per check and read: the size of the kernel's own read-ahead.
const PIECE_BYTES: usize = 128 * 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadAheadResult {
    /// Bytes that were not in the page cache.
    pub(crate) read: u64,
    /// True if the whole model is in the page cache.
    pub(crate) whole: bool,
}

/// Reads uncached parts, for at most `limit`. Reads nothing if the model is larger than `available`: its
/// last parts would evict its first ones. Blocks as long as the disk does.
pub(crate) fn read_ahead(
    command: &ServerCommand,
    available: Option<u64>,
    limit: Duration,
) -> ReadAheadResult {
    let until = Instant::now() + limit;
    let models = super::needed_files(command).into_iter().filter(|need| need.model);
    let files: Vec<(File, u64)> = models.filter_map(|need| open_regular(&need.path)).collect();
    let all: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let mut ahead = ReadAheadResult { read: 0, whole: false };
    if available.is_none_or(|available| all > available) {
        return ahead;
    }
    let mut room = vec![0; PIECE_BYTES];
    for (file, bytes) in &files {
        for at in (0..*bytes).step_by(PIECE_BYTES) {
            if is_cached(file, at) {
                continue;
            }
            if Instant::now() >= until {
                return ahead;
            }
            match file.read_at(&mut room, at) {
                Ok(read) => ahead.read += read as u64,
                // The start itself reports the error.
                Err(_) => return ahead,
            }
        }
    }
    ahead.whole = true;
    ahead
}

/// Opens only a regular file, because reading other types has side effects.
fn open_regular(path: &Path) -> Option<(File, u64)> {
    let data = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((File::open(path).ok()?, data.len()))
}

/// True if the byte at this offset is in the page cache, or the file system cannot tell.
fn is_cached(file: &File, at: u64) -> bool {
    let mut byte = [0];
    let read = preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT);
    !matches!(read, Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Advice, fadvise};

    use super::*;

    const BYTES: u64 = 4 << 20;

    fn model(home: &Path) -> (ServerCommand, File) {
        let path = home.join("m.gguf");
        std::fs::write(&path, vec![7; usize::try_from(BYTES).unwrap()]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let command = ServerCommand {
            args: vec!["-m".to_owned(), "m.gguf".to_owned()],
            directory: Some(home.to_owned()),
            ..ServerCommand::from_binary("/bin/true".into())
        };
        (command, file)
    }

    fn cached(file: &File) -> u64 {
        (0..BYTES).step_by(PIECE_BYTES).filter(|at| is_cached(file, *at)).count() as u64 * PIECE_BYTES as u64
    }

    #[test]
    fn what_has_left_the_page_cache_is_there_again_and_what_is_there_is_not_read() {
        let home = tempfile::tempdir().unwrap();
        let (command, file) = model(home.path());
        let minute = Duration::from_secs(60);
        let ahead = read_ahead(&command, Some(BYTES), minute);
        assert_eq!(ahead, ReadAheadResult { read: 0, whole: true }, "it was just written");
        let forget = || fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        forget();
        // A file system in memory cannot drop pages.
        let forgets = !is_cached(&file, 0);
        // Too large, or too late.
        assert!(
            !read_ahead(&command, Some(BYTES - 1), minute).whole && !read_ahead(&command, None, minute).whole
        );
        assert_eq!(read_ahead(&command, Some(BYTES), Duration::ZERO).read, 0);
        let mut read = 0;
        // The kernel's own read-ahead, which a check triggers, may be faster.
        for _ in 0..20 {
            forget();
            let ahead = read_ahead(&command, Some(BYTES), minute);
            assert!(ahead.whole && cached(&file) == BYTES, "{ahead:?}");
            read += ahead.read;
        }
        assert_eq!(read > 0, forgets, "{read} bytes were read");
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let (mut command, _) = model(home.path());
        for odd in ["missing.gguf", "/dev/zero", "."] {
            command.args[1] = odd.to_owned();
            assert_eq!(read_ahead(&command, Some(BYTES), Duration::from_secs(60)).read, 0, "{odd}");
        }
    }
}
