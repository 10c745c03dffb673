//! Tells from a program's file that it cannot be traced.

use std::fmt;
use std::fs::File;
use std::path::Path;

use object::read::elf::{ElfFile64, ProgramHeader as _};
use object::{Endianness, ReadCache, elf};

/// Reason why the dynamic loader cannot preload the library into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreloadObstacle {
    /// The program is linked statically and has no dynamic loader.
    Static,
    /// The program is linked to musl, whose loader fails on a glibc library and ends the program.
    Musl,
}

impl fmt::Display for PreloadObstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Static => "is linked statically, so that no library can be put before its functions",
            Self::Musl => "is linked with musl, and the library wants glibc",
        })
    }
}

/// Returns the obstacle, if any; `None` also for scripts, and programs for other processors.
pub fn preload_obstacle(program: &Path) -> Option<PreloadObstacle> {
    let cache = ReadCache::new(File::open(program).ok()?);
    let file = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let endian = file.endian();
    let data = file.data();
    let headers = file.elf_program_headers();
    let loader = headers
        .iter()
        .find(|header| header.p_type(endian) == elf::PT_INTERP)
        .map(|header| header.interpreter(endian, data));
    match loader {
        None => Some(PreloadObstacle::Static),
        Some(Ok(Some(path))) if path.windows(7).any(|part| part == b"ld-musl") => Some(PreloadObstacle::Musl),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_can_be_traced_and_what_is_no_program_says_nothing() {
        assert_eq!(preload_obstacle(&std::env::current_exe().unwrap()), None);
        assert_eq!(preload_obstacle(Path::new("/etc/passwd")), None);
        assert_eq!(preload_obstacle(Path::new("/nowhere")), None);
    }
}
