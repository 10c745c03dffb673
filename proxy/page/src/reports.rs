//! Reports of `diagnose` in the folder `reports` of the state directory. This module only reads them.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

pub(crate) const MAX_LISTED: usize = 200;
/// Largest report that is served, in bytes. A report about an hour has about a megabyte.
pub(crate) const MAX_REPORT_BYTES: u64 = 32 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportFile {
    pub(crate) name: String,
    /// Time of the last change, in seconds since 1970.
    pub(crate) at: i64,
    pub(crate) bytes: u64,
}

impl ReportFile {
    /// Returns whether the report is listed but not served, because it is too large.
    pub(crate) const fn is_too_large(&self) -> bool {
        self.bytes > MAX_REPORT_BYTES
    }
}

pub(crate) fn report_folder(ledger: &str) -> PathBuf {
    Path::new(ledger).parent().unwrap_or_else(|| Path::new("/nowhere")).join("reports")
}

/// Returns whether a name may be that of a report: no path, no hidden file.
pub(crate) fn is_report(name: &str) -> bool {
    name.strip_suffix(".html").is_some_and(|stem| !stem.is_empty())
        && !name.starts_with('.')
        && !name.contains(['/', '\\', '\0'])
}

/// Returns the reports in a folder, the latest first. Blocks.
pub(crate) fn list_reports(folder: &Path) -> Vec<ReportFile> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok().filter(|name| is_report(name))?;
        let facts = entry.metadata().ok().filter(std::fs::Metadata::is_file)?;
        // An empty file is a report that is being written.
        if facts.len() == 0 {
            return None;
        }
        let at = facts.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some(ReportFile { name, at: i64::try_from(at.as_secs()).ok()?, bytes: facts.len() })
    });
    let mut all: Vec<ReportFile> = all.collect();
    all.sort_by(|a, b| (b.at, &a.name).cmp(&(a.at, &b.name)));
    all.truncate(MAX_LISTED);
    all
}

pub(crate) fn read_report(folder: &Path, name: &str) -> Option<Vec<u8>> {
    if !is_report(name) {
        return None;
    }
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).ok()?;
    let file = File::options().read(true).custom_flags(flags).open(folder.join(name)).ok()?;
    let facts = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    if facts.len() > MAX_REPORT_BYTES {
        return None;
    }
    let mut content = Vec::new();
    file.take(MAX_REPORT_BYTES).read_to_end(&mut content).ok()?;
    Some(content)
}

pub(crate) fn plain_file_name(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let text: String = name.chars().map(safe).collect();
    text.trim_start_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reports_of_the_folder_are_listed_and_served() {
        let dir = tempfile::tempdir().unwrap();
        let reports = dir.path().join("reports");
        std::fs::create_dir(&reports).unwrap();
        assert!(list_reports(&dir.path().join("nothing")).is_empty());
        std::fs::write(dir.path().join("secret.html"), "secret").unwrap();
        for name in ["a.html", "b <x>.html", ".hidden.html", "notes.txt", ".html"] {
            std::fs::write(reports.join(name), name).unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("secret.html"), reports.join("link.html")).unwrap();
        std::fs::create_dir(reports.join("dir.html")).unwrap();
        let mut names: Vec<String> = list_reports(&reports).into_iter().map(|report| report.name).collect();
        names.sort();
        assert_eq!(names, ["a.html", "b <x>.html"]);
        assert_eq!(read_report(&reports, "a.html").as_deref(), Some(b"a.html".as_slice()));
        for name in
            ["../secret.html", "link.html", "dir.html", ".hidden.html", "notes.txt", "no.html", "/etc/passwd"]
        {
            assert_eq!(read_report(&reports, name), None, "{name}");
        }
        let large = File::create(reports.join("large.html")).unwrap();
        large.set_len(MAX_REPORT_BYTES + 1).unwrap();
        assert_eq!(read_report(&reports, "large.html"), None, "nobody's memory is filled by it");
        assert!(
            list_reports(&reports).iter().any(|report| report.name == "large.html" && report.is_too_large())
        );
    }
}
