//! Reads the access control list (POSIX.1e) of a file, which extends the file's mode.

use std::io;
use std::path::Path;

use rustix::fs::getxattr;
use rustix::io::Errno;

const ACL_ATTRIBUTE: &str = "system.posix_acl_access";

pub(crate) fn access_list(path: &Path) -> io::Result<Option<Vec<u8>>> {
    // The kernel limits an extended attribute to 64 KiB.
    let mut list = vec![0; 64 << 10];
    match getxattr(path, ACL_ATTRIBUTE, &mut list[..]) {
        Ok(bytes) => {
            list.truncate(bytes);
            Ok(Some(list))
        }
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
