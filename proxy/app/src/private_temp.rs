//! Temporary folders that only the current user can enter. The `tempfile` crate leaves the mode to the umask,
//! which usually lets other users read. The folders hold traces and other files of tools that inspect a
//! server, which may contain prompts.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;

use tempfile::TempDir;

/// Creates a folder of mode 0700 whose name begins with `prefix`.
pub(crate) fn private_folder(prefix: &str) -> io::Result<TempDir> {
    tempfile::Builder::new().prefix(prefix).permissions(Permissions::from_mode(0o700)).tempdir()
}

#[cfg(test)]
mod tests {
    #[test]
    fn nobody_else_can_look_into_a_temporary_folder() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = super::private_folder("lw-").unwrap();
        assert_eq!(folder.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
}
