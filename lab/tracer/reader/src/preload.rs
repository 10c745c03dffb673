//! What keeps a program from being traced, as far as its file tells.

use std::fmt;
use std::fs::File;
use std::path::Path;

use object::read::elf::{ElfFile64, ProgramHeader as _};
use object::{Endianness, ReadCache, elf};

/// Why the loader cannot put a library before a program's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It is linked statically, so nothing loads libraries.
    Static,
    /// It is linked with musl, whose loader cannot take a library that wants glibc, and ends the program.
    Musl,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Static => "is linked statically, so that no library can be put before its functions",
            Self::Musl => "is linked with musl, and the library wants glibc",
        })
    }
}

/// What stands against it; `None` where nothing does or the file says nothing: a script, something of another processor.
pub fn obstacle(program: &Path) -> Option<Obstacle> {
    let cache = ReadCache::new(File::open(program).ok()?);
    let file = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let (endian, data) = (file.endian(), file.data());
    let headers = file.elf_program_headers();
    let loader = headers
        .iter()
        .find(|header| header.p_type(endian) == elf::PT_INTERP)
        .map(|header| header.interpreter(endian, data));
    match loader {
        None => Some(Obstacle::Static),
        Some(Ok(Some(path))) if path.windows(7).any(|part| part == b"ld-musl") => Some(Obstacle::Musl),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_can_be_traced_and_what_is_no_program_says_nothing() {
        assert_eq!(obstacle(&std::env::current_exe().unwrap()), None);
        assert_eq!(obstacle(Path::new("/etc/passwd")), None);
        assert_eq!(obstacle(Path::new("/nowhere")), None);
    }
}
