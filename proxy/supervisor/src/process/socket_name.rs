//! Names of sockets, which contain a PID. No other module interprets names in the private directory.

use std::path::{Path, PathBuf};

use warden_policies::{GenerationId, ModelName};

use crate::process::instance;

/// Longest path of a Unix socket on Linux: `sun_path` has 108 bytes, with a final zero.
pub(crate) const SOCKET_PATH_LIMIT: usize = 107;

/// Path of a generation's socket. A path is never used twice, because llama-server cannot listen on an
/// existing socket file: the instance's PID in it differs from that of an earlier run that ended without
/// cleaning up.
pub(crate) fn socket_path(directory: &Path, model: &ModelName, generation: GenerationId) -> PathBuf {
    const MAX_MODEL_CHARS: usize = 12;
    let last = model.as_str().rsplit('/').next().unwrap_or_default();
    let tame = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '_' { c } else { '-' };
    let short: String = last.chars().take(MAX_MODEL_CHARS).map(tame).collect();
    directory.join(format!("{short}-{}-{generation}.sock", instance::instance_pid()))
}

/// PID in the name of a socket made by [`socket_path`], or of a report file or slot directory next to such
/// a socket.
pub(crate) fn maker_pid(file_name: &str) -> Option<u32> {
    // Further processes of a generation append their PIDs to the name of the report file.
    let numbered = file_name.rsplit_once('.').filter(|(_, end)| end.parse::<u32>().is_ok());
    let file_name =
        numbered.map(|(name, _)| name).filter(|name| name.ends_with(".report")).unwrap_or(file_name);
    let kinds = [".sock", ".report", ".reclaim", ".slots"];
    let stem = kinds.iter().find_map(|kind| file_name.strip_suffix(kind))?;
    let mut parts = stem.rsplit('-');
    parts.next()?.strip_prefix('g')?.parse::<u64>().ok()?;
    parts.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_name_is_short_tame_and_tells_its_maker() {
        let path =
            socket_path(Path::new("/run/w"), &ModelName::new("org/Some Long-Model.gguf"), GenerationId(12));
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(name, format!("Some-Long-Mo-{}-g12.sock", std::process::id()));
        assert_eq!(maker_pid(name), Some(std::process::id()));
        let report = crate::process::report_file::report_path(&path);
        let report = report.file_name().unwrap().to_str().unwrap();
        assert_eq!(report, format!("Some-Long-Mo-{}-g12.report", std::process::id()));
        assert_eq!(maker_pid(report), Some(std::process::id()));
        assert_eq!(maker_pid(&format!("{report}.4711")), Some(std::process::id()));
        assert_eq!(maker_pid("a-1-g2.slots"), Some(1));
        assert_eq!(maker_pid("a-1-g2.sock.4711"), None);
        assert_eq!(maker_pid("else.sock"), None);
        assert_eq!(maker_pid("a-1-g2.txt"), None);
    }
}
