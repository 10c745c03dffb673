//! Reads the names of loader and libraries from an ELF program. Reads are bounded, because a binary may
//! have a gigabyte, or may be any other file.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use object::elf::{DT_NEEDED, DT_NULL, DT_RPATH, DT_RUNPATH, DT_STRSZ, DT_STRTAB, FileHeader64, PT_LOAD};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache, ReadRef};

/// Maximum size of a table that is read, in bytes; the loader supports no larger tables.
const MAX_TABLE_BYTES: u64 = 1 << 20;
/// Maximum number of entries read from a program or library table.
const MAX_ENTRIES: usize = 4096;

/// Facts from an ELF file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ElfFile {
    /// Path of the loader.
    pub(crate) interpreter: Option<PathBuf>,
    /// Names of needed libraries.
    pub(crate) needed: Vec<String>,
    /// Additional search paths (runpath), as written in the file.
    pub(crate) search_paths: Vec<String>,
}

/// A file of which only small pieces are read.
#[derive(Clone, Copy)]
struct ElfPieces<'a>(&'a ReadCache<File>);

impl<'a> ReadRef<'a> for ElfPieces<'a> {
    fn len(self) -> Result<u64, ()> {
        self.0.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        if size > MAX_TABLE_BYTES { Err(()) } else { self.0.read_bytes_at(offset, size) }
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        self.0.read_bytes_at_until(range, delimiter)
    }
}

/// Reads the facts from a file. `None` if it is not a valid 64-bit ELF file.
pub(crate) fn read_elf(path: &Path) -> Option<ElfFile> {
    // Open only regular files: opening a pipe could block.
    fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let cache = ReadCache::new(File::open(path).ok()?);
    let data = ElfPieces(&cache);
    let header = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, data).ok()?;
    let mut elf = ElfFile::default();
    for segment in segments.iter().take(MAX_ENTRIES) {
        if let Some(interpreter) = segment.interpreter(endian, data).ok()? {
            elf.interpreter = Some(PathBuf::from(std::str::from_utf8(interpreter).ok()?));
        }
    }
    let mut table = None;
    for segment in segments.iter().take(MAX_ENTRIES) {
        table = table.or(segment.dynamic(endian, data).ok()?);
    }
    let Some(table) = table else { return Some(elf) };
    let entries = || {
        let all = table.iter().take(MAX_ENTRIES).map(|entry| (entry.d_tag(endian), entry.d_val(endian)));
        all.take_while(|(tag, _)| *tag != u64::from(DT_NULL))
    };
    let value = |wanted: u32| entries().find(|(tag, _)| *tag == u64::from(wanted)).map(|(_, value)| value);
    let (Some(address), Some(size)) = (value(DT_STRTAB), value(DT_STRSZ)) else { return Some(elf) };
    let start = segments.iter().take(MAX_ENTRIES).find_map(|segment| {
        let inside = address.checked_sub(segment.p_vaddr(endian))?;
        let is_there = segment.p_type(endian) == PT_LOAD && inside < segment.p_filesz(endian);
        is_there.then(|| segment.p_offset(endian).checked_add(inside)).flatten()
    })?;
    let strings = data.read_bytes_at(start, size).ok()?;
    let text = |at: u64| {
        let rest = strings.get(usize::try_from(at).ok()?..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(rest.get(..end)?).ok().map(str::to_owned)
    };
    for (tag, at) in entries() {
        if tag == u64::from(DT_NEEDED) {
            elf.needed.push(text(at)?);
        } else if tag == u64::from(DT_RUNPATH) || tag == u64::from(DT_RPATH) {
            elf.search_paths.extend(text(at)?.split(':').filter(|part| !part.is_empty()).map(str::to_owned));
        }
    }
    Some(elf)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Bytes of a program with these names, in one segment at address 0.
    pub(crate) fn made(interpreter: &str, needed: &[&str], runpath: &str) -> Vec<u8> {
        let mut strings = vec![0_u8];
        let mut add = |text: &str| {
            let at = strings.len() as u64;
            strings.extend_from_slice(text.as_bytes());
            strings.push(0);
            at
        };
        let mut entries: Vec<(u64, u64)> =
            needed.iter().map(|name| (u64::from(DT_NEEDED), add(name))).collect();
        if !runpath.is_empty() {
            entries.push((u64::from(DT_RUNPATH), add(runpath)));
        }
        let loader = [interpreter.as_bytes(), b"\0"].concat();
        let headers = 64 + 3 * 56_u64;
        let table = headers + (loader.len() as u64).next_multiple_of(8);
        let text = table + (entries.len() as u64 + 3) * 16;
        let whole = text + strings.len() as u64;
        entries.extend([
            (u64::from(DT_STRTAB), text),
            (u64::from(DT_STRSZ), strings.len() as u64),
            (u64::from(DT_NULL), 0),
        ]);
        let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        file.extend([3_u16, 62].iter().flat_map(|half| half.to_le_bytes()));
        file.extend(1_u32.to_le_bytes());
        file.extend([0_u64, 64, 0].iter().flat_map(|word| word.to_le_bytes()));
        file.extend(0_u32.to_le_bytes());
        file.extend([64_u16, 56, 3, 0, 0, 0].iter().flat_map(|half| half.to_le_bytes()));
        for (kind, at, size) in
            [(1_u32, 0, whole), (3, headers, loader.len() as u64), (2, table, text - table)]
        {
            file.extend([kind, 4].iter().flat_map(|word| word.to_le_bytes()));
            file.extend([at, at, at, size, size, 8].iter().flat_map(|word| word.to_le_bytes()));
        }
        file.extend(&loader);
        file.resize(usize::try_from(table).unwrap(), 0);
        file.extend(
            entries.iter().flat_map(|(tag, value)| [tag.to_le_bytes(), value.to_le_bytes()].concat()),
        );
        file.extend(strings);
        file
    }

    fn of(bytes: &[u8]) -> Option<ElfFile> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        fs::write(&path, bytes).unwrap();
        read_elf(&path)
    }

    #[test]
    fn a_program_names_its_loader_its_libraries_and_where_they_are() {
        let elf = of(&made("/lib64/ld-linux.so.2", &["libc.so.6", "libx.so"], "$ORIGIN/lib:/opt/x")).unwrap();
        assert_eq!(elf.interpreter.as_deref(), Some(Path::new("/lib64/ld-linux.so.2")));
        assert_eq!(elf.needed, ["libc.so.6", "libx.so"]);
        assert_eq!(elf.search_paths, ["$ORIGIN/lib", "/opt/x"]);
        let own = read_elf(&std::env::current_exe().unwrap()).unwrap();
        assert!(own.needed.iter().any(|name| name.starts_with("libc.so")), "{own:?}");
    }

    #[test]
    fn what_is_no_program_or_a_broken_one_says_nothing_and_takes_no_memory() {
        let whole = made("/lib/ld-linux.so.2", &["libc.so.6"], "");
        assert_eq!(of(b"#!/bin/sh\n"), None);
        for length in 0..whole.len() {
            // Cut anywhere: the result is nothing or correct.
            let found = of(&whole[..length]);
            assert!(found.is_none_or(|elf| elf.needed.len() <= 1), "{length}");
        }
        for at in 16..whole.len() {
            let mut broken = whole.clone();
            broken[at] = 0xff;
            of(&broken);
        }
    }
}
