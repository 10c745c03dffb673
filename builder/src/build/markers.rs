//! Looks into a binary for the text that each fix leaves there. A patched file that is not part of the build, or code
//! that the linker threw away, would else pass for a cure.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use memchr::memmem::Finder;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, Result, io_error};

/// Bytes looked at together: a binary for GPUs has hundreds of MiB and need not be in memory.
const CHUNK: usize = 1 << 20;

/// Of fixes with their markers, the ids of those whose marker is not in the file. A fix with an empty one cannot be
/// missed. Blocks.
pub(crate) fn missing<'a>(
    binary: &Path,
    fixes: impl Iterator<Item = (&'a str, &'a str)>,
    cancel: &CancellationToken,
) -> Result<Vec<String>> {
    let mut wanted: Vec<(&str, Finder<'_>)> = fixes
        .filter(|(_, marker)| !marker.is_empty())
        .map(|(fix, marker)| (fix, Finder::new(marker.as_bytes())))
        .collect();
    let overlap = wanted.iter().map(|(_, finder)| finder.needle().len()).max().unwrap_or(1) - 1;
    let mut file = File::open(binary).map_err(io_error("opening", binary))?;
    let mut window: Vec<u8> = Vec::with_capacity(CHUNK + overlap);
    while !wanted.is_empty() {
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        // A marker may lie across the border of two chunks.
        let kept = window.len().min(overlap);
        window.drain(..window.len() - kept);
        if append(&mut file, &mut window).map_err(io_error("reading", binary))? == 0 {
            break;
        }
        wanted.retain(|(_, finder)| finder.find(&window).is_none());
    }
    Ok(wanted.into_iter().map(|(fix, _)| fix.to_owned()).collect())
}

fn append(file: &mut File, window: &mut Vec<u8>) -> io::Result<usize> {
    file.take(CHUNK as u64).read_to_end(window)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_found_anywhere_also_across_the_border_of_two_chunks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("binary");
        let fixes = [("begin", "AAA-first"), ("border", "BBB-border"), ("end", "CCC-last"), ("none", "")];
        for shift in 0..12 {
            let mut bytes = b"AAA-first".to_vec();
            bytes.resize(CHUNK - shift, 0);
            bytes.extend_from_slice(b"BBB-border");
            bytes.resize(2 * CHUNK + 7, 0);
            bytes.extend_from_slice(b"CCC-last");
            std::fs::write(&path, bytes).unwrap();
            let cancel = CancellationToken::new();
            assert_eq!(missing(&path, fixes.into_iter(), &cancel).unwrap(), Vec::<String>::new(), "{shift}");
        }
    }

    #[test]
    fn a_marker_that_is_not_there_names_its_fix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("binary");
        std::fs::write(&path, "AAA-firs AAA-second").unwrap();
        let fixes = [("one", "AAA-first"), ("two", "AAA-second")];
        assert_eq!(missing(&path, fixes.into_iter(), &CancellationToken::new()).unwrap(), ["one"]);
    }

    #[test]
    fn an_empty_file_has_no_marker() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("binary");
        std::fs::write(&path, "").unwrap();
        assert_eq!(missing(&path, [("one", "x")].into_iter(), &CancellationToken::new()).unwrap(), ["one"]);
    }
}
