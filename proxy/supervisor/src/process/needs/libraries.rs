//! Checks before a start that a program's libraries are where its loader looks for them. Only loaders with
//! `ld.so.cache` are supported.
//!
//! A library is reported missing only if no loader could find it. Reads are bounded, because a binary may
//! have a gigabyte, or may be any other file.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use object::elf::{DT_NEEDED, DT_NULL, DT_RPATH, DT_RUNPATH, DT_STRSZ, DT_STRTAB, FileHeader64, PT_LOAD};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache, ReadRef};

use crate::error::FailureKind;
use crate::process::needs::MissingNeed;
use crate::spec::ServerCommand;

const DEFAULT_DIRECTORIES: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// The loader's index of libraries in all other directories.
pub(crate) const LD_CACHE: &str = "/etc/ld.so.cache";
/// Size limit of the cache. Usual caches have some hundred kilobytes.
const MAX_CACHE_BYTES: u64 = 64 << 20;
const MAX_LIBRARIES: usize = 256;
/// Size limit of a table; the loader supports no larger ones.
const MAX_TABLE_BYTES: u64 = 1 << 20;
const MAX_ENTRIES: usize = 4096;

/// First missing library that the binary or one of its libraries needs. Adds existing libraries to `used`.
pub(crate) fn missing_library(command: &ServerCommand, used: &mut Vec<PathBuf>) -> Option<MissingNeed> {
    let binary = command.binary.is_absolute().then_some(command.binary.as_path())?;
    let cache = fs::metadata(LD_CACHE).ok().filter(|data| data.len() <= MAX_CACHE_BYTES);
    let cache = cache.and_then(|_| fs::read(LD_CACHE).ok());
    find_missing(binary, &library_path(command), cache.as_deref(), used)
}

fn find_missing(
    binary: &Path,
    listed: &[PathBuf],
    cache: Option<&[u8]>,
    used: &mut Vec<PathBuf>,
) -> Option<MissingNeed> {
    let program = read_elf(binary)?;
    let interpreter = program.interpreter.as_ref()?;
    if !interpreter.exists() {
        let message = format!(
            "cannot run {}: its loader {} is not there: install it, or build the binary for this system",
            binary.display(),
            interpreter.display()
        );
        return Some(MissingNeed { kind: FailureKind::NotExecutable, message });
    }
    let loader = interpreter.file_name()?.to_str()?;
    // For another C library, or without a cache, the search paths are unknown.
    if !loader.starts_with("ld-linux") && !loader.starts_with("ld64") {
        return None;
    }
    let cache = cache?;
    let mut places: Vec<PathBuf> = listed.to_vec();
    let mut seen = BTreeSet::new();
    let mut next = vec![(binary.to_owned(), program)];
    while let Some((path, elf)) = next.pop() {
        for place in &elf.search_paths {
            places.push(expand_origin(place, &path)?);
        }
        for name in elf.needed {
            if seen.len() >= MAX_LIBRARIES || !seen.insert(name.clone()) {
                continue;
            }
            let Some(found) = find_library(&name, &places, cache) else {
                let message = format!(
                    "the shared library {name}, which {} needs, is in none of the places where it is looked for: \
                     install it or put it back, or name its directory in `env.LD_LIBRARY_PATH`",
                    path.display()
                );
                return Some(MissingNeed { kind: FailureKind::MissingLibrary, message });
            };
            used.push(found.clone());
            // Skip the needs of an unreadable library.
            next.extend(read_elf(&found).map(|elf| (found, elf)));
        }
    }
    None
}

fn find_library(name: &str, places: &[PathBuf], cache: &[u8]) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.exists());
    }
    let cached = cache.split(|byte| *byte == 0).filter_map(|text| {
        let path = std::str::from_utf8(text).ok()?;
        // Binary data of the cache may precede the first path.
        let path = path.get(path.find('/')?..)?;
        (path.rsplit('/').next() == Some(name)).then(|| PathBuf::from(path))
    });
    let beside =
        places.iter().cloned().chain(DEFAULT_DIRECTORIES.map(PathBuf::from)).map(|place| place.join(name));
    beside.chain(cached).find(|path| path.exists())
}

fn library_path(command: &ServerCommand) -> Vec<PathBuf> {
    const LIBRARY_PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
    // `env_remove` applies also to the command's own environment.
    if command.env_remove.iter().any(|name| name == LIBRARY_PATH_VARIABLE) {
        return Vec::new();
    }
    let own = command.own_variable(LIBRARY_PATH_VARIABLE).map(Into::into);
    let value: std::ffi::OsString =
        own.or_else(|| std::env::var_os(LIBRARY_PATH_VARIABLE)).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// Expands `$ORIGIN`; `None` if the path has another variable of the loader.
fn expand_origin(place: &str, of: &Path) -> Option<PathBuf> {
    let real = fs::canonicalize(of).ok()?;
    let folder = real.parent()?.to_str()?;
    let text = place.replace("${ORIGIN}", folder).replace("$ORIGIN", folder);
    (!text.contains('$')).then(|| PathBuf::from(text))
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ElfFile {
    interpreter: Option<PathBuf>,
    needed: Vec<String>,
    /// Additional search paths (runpath), unexpanded.
    search_paths: Vec<String>,
}

/// Reads only small pieces of a file.
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

/// Returns `None` if the file is no valid 64-bit ELF file.
fn read_elf(path: &Path) -> Option<ElfFile> {
    // Opening a pipe could block.
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

    /// A folder with a loader of the usual C library, which all files name.
    struct Home {
        folder: tempfile::TempDir,
        loader: String,
    }

    impl Home {
        fn new(loader: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(loader);
            fs::write(&path, "").unwrap();
            Self { loader: path.to_str().unwrap().to_owned(), folder }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn file(&self, name: &str, needed: &[&str], runpath: &str) -> PathBuf {
            let path = self.at(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, made(&self.loader, needed, runpath)).unwrap();
            path
        }
    }

    fn message(binary: &Path, listed: &[PathBuf], cache: &[u8]) -> Option<String> {
        find_missing(binary, listed, Some(cache), &mut Vec::new()).map(|missing| missing.message)
    }

    #[test]
    fn a_library_that_is_nowhere_is_missed_by_name_wherever_it_is_named() {
        let home = Home::new("ld-linux-x86-64.so.2");
        let binary = home.file("bin/server", &["libown.so.1"], "$ORIGIN/../lib");
        let told = message(&binary, &[], b"").unwrap();
        assert!(told.contains("libown.so.1, which") && told.contains("bin/server needs"), "{told}");
        // The library is found by the runpath, and then its own needs are checked.
        home.file("lib/libown.so.1", &["libdeep.so.2"], "");
        let told = message(&binary, &[], b"").unwrap();
        assert!(told.contains("libdeep.so.2, which") && told.contains("lib/libown.so.1 needs"), "{told}");
        let deep = home.file("deep/libdeep.so.2", &["libown.so.1"], "");
        let cache = format!("glibc-ld.so.cache1.1\u{1}\0libdeep.so.2\0{}\0", deep.display());
        assert_eq!(message(&binary, &[], cache.as_bytes()), None, "in the loader's list");
        assert_eq!(message(&binary, &[home.at("deep")], b""), None, "in LD_LIBRARY_PATH");
        fs::remove_file(deep).unwrap();
        assert!(message(&binary, &[], cache.as_bytes()).is_some(), "the list is older than the disk");
    }

    #[test]
    fn a_removed_variable_lists_no_directory() {
        let mut command = ServerCommand {
            env: vec![("LD_LIBRARY_PATH".to_owned(), "/one::/two".to_owned())],
            ..ServerCommand::default()
        };
        assert_eq!(library_path(&command), [PathBuf::from("/one"), PathBuf::from("/two")]);
        command.env_remove.push("LD_LIBRARY_PATH".to_owned());
        assert!(library_path(&command).is_empty());
    }

    #[test]
    fn what_is_not_sure_is_not_missed() {
        let home = Home::new("ld-musl-x86_64.so.1");
        let binary = home.file("server", &["libnowhere.so"], "");
        assert_eq!(message(&binary, &[], b""), None, "another loader");
        let home = Home::new("ld-linux-x86-64.so.2");
        let binary = home.file("server", &["libnowhere.so"], "");
        assert_eq!(find_missing(&binary, &[], None, &mut Vec::new()), None, "no list");
        let binary = home.file("server", &["libnowhere.so"], "/opt/$LIB");
        assert_eq!(message(&binary, &[], b""), None, "a place that nobody knows here");
        fs::write(home.at("script"), "#!/bin/sh\n").unwrap();
        assert_eq!(message(&home.at("script"), &[], b""), None);
    }

    #[test]
    fn a_loader_that_is_not_there_is_named() {
        let home = Home::new("ld-linux-x86-64.so.2");
        let binary = home.file("server", &[], "");
        fs::remove_file(&home.loader).unwrap();
        let missing = find_missing(&binary, &[], None, &mut Vec::new()).unwrap();
        assert_eq!(missing.kind, FailureKind::NotExecutable);
        assert!(missing.message.contains(&home.loader), "{}", missing.message);
    }

    #[test]
    fn programs_of_this_machine_miss_nothing() {
        let cache = fs::read(LD_CACHE).unwrap_or_default();
        for program in ["/bin/sh", "/usr/bin/env", "/usr/bin/c++"] {
            assert_eq!(message(Path::new(program), &[], &cache), None, "{program}");
        }
    }
}
