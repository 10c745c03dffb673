//! Reports of `diagnose` that lie in `reports` of the state directory, and how to make one. [`read`] and [`one`] alone read
//! files; nothing is written there.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use warden_pages::Html;
use warden_policies::{ByteSize, ModelName};

use super::part::link;

/// Reports that are listed.
const LISTED: usize = 200;
/// The largest report that is served: one of an hour has about a megabyte.
const LARGEST: u64 = 32 << 20;

/// A report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) name: String,
    /// Seconds since 1970.
    pub(crate) at: i64,
    pub(crate) bytes: u64,
}

/// Where reports are.
pub(crate) fn folder(ledger: &str) -> PathBuf {
    Path::new(ledger).parent().unwrap_or_else(|| Path::new("/nowhere")).join("reports")
}

/// Whether a name can be one of a report: nothing that leads elsewhere, nothing that is hidden.
fn is_report(name: &str) -> bool {
    name.strip_suffix(".html").is_some_and(|stem| !stem.is_empty())
        && !name.starts_with('.')
        && !name.contains(['/', '\\', '\0'])
}

/// The reports of a folder, the latest first. It blocks.
pub(crate) fn read(folder: &Path) -> Vec<Written> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok().filter(|name| is_report(name))?;
        let facts = entry.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let at = facts.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some(Written { name, at: i64::try_from(at.as_secs()).ok()?, bytes: facts.len() })
    });
    let mut all: Vec<Written> = all.collect();
    all.sort_by(|a, b| (b.at, &a.name).cmp(&(a.at, &b.name)));
    all.truncate(LISTED);
    all
}

/// One report, if it is there and is a file of its own. It blocks.
pub(crate) fn one(folder: &Path, name: &str) -> Option<Vec<u8>> {
    if !is_report(name) {
        return None;
    }
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).ok()?;
    let file = File::options().read(true).custom_flags(flags).open(folder.join(name)).ok()?;
    let facts = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    if facts.len() > LARGEST {
        return None;
    }
    let mut content = Vec::new();
    file.take(LARGEST).read_to_end(&mut content).ok()?;
    Some(content)
}

/// What stands in `<main>`.
pub(crate) fn view<'a>(
    reports: &[Written],
    folder: &Path,
    models: impl Iterator<Item = &'a ModelName>,
) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Diagnose");
    html.within("p", &[], |p| {
        p.text("An experiment starts a fresh llama-server beside those that serve, sends it one kind of request again and again, and says ");
        p.text("whether its memory grows without an end, by how much, and who pays. It needs the memory of one more process.");
    });
    html.element("h2", &[], "Make a report");
    html.within("p", &[], |p| {
        p.text("It is started in a terminal, because it takes minutes to hours and memory that requests may need. What it writes into ");
        p.element("code", &[], folder.display()).text(" is listed here:");
    });
    for model in models.take(10) {
        let path = folder.join(format!("{}.html", plain(model.as_str())));
        html.element(
            "pre",
            &[("tabindex", &"0"), ("role", &"region"), ("aria-label", &format_args!("Command for {model}"))],
            format_args!(
                "llama-warden diagnose --config FILE --model {} --html {}",
                quoted(model.as_str()),
                quoted(&path.to_string_lossy())
            ),
        );
    }
    html.element("h2", &[], "Reports");
    if reports.is_empty() {
        html.element("p", &[("class", &"quiet")], "There is none yet.");
        return html;
    }
    html.within("table", &[("class", &"reports"), ("id", &"rows")], |table| {
        table.element("caption", &[("class", &"unseen")], "Reports, the latest first");
        table.within("thead", &[], |head| {
            head.within("tr", &[], |row| {
                for title in ["Report", "Written", "Size"] {
                    row.element("th", &[("scope", &"col")], title);
                }
            });
        });
        table.within("tbody", &[], |body| {
            for report in reports {
                body.within(
                    "tr",
                    &[
                        ("class", &"row"),
                        ("id", &format_args!("r-{}", super::files::hash(report.name.as_bytes()))),
                    ],
                    |tr| {
                        tr.within("th", &[("scope", &"row")], |th| {
                            link(th, &address(&report.name), &report.name);
                        });
                        tr.within("td", &[("data-title", &"Written")], |td| {
                            td.raw(&warden_pages::time::time(report.at));
                        });
                        tr.element(
                            "td",
                            &[("data-title", &"Size"), ("class", &"number")],
                            ByteSize(report.bytes),
                        );
                    },
                );
            }
        });
    });
    html
}

/// A name as a part of a path.
fn address(name: &str) -> String {
    let mut path = String::from("/page/reports/");
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => path.push(char::from(byte)),
            other => path.extend(["%", &hex::encode_upper([other])]),
        }
    }
    path
}

/// A model's name as the name of a file.
fn plain(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let text: String = name.chars().map(safe).collect();
    text.trim_start_matches('.').to_owned()
}

/// A word for a shell. What no shell can take stays as it is, for people to see.
fn quoted(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reports_of_the_folder_are_listed_and_served() {
        let dir = tempfile::tempdir().unwrap();
        let reports = dir.path().join("reports");
        std::fs::create_dir(&reports).unwrap();
        assert!(read(&dir.path().join("nothing")).is_empty());
        std::fs::write(dir.path().join("secret.html"), "secret").unwrap();
        for name in ["a.html", "b <x>.html", ".hidden.html", "notes.txt", ".html"] {
            std::fs::write(reports.join(name), name).unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("secret.html"), reports.join("link.html")).unwrap();
        std::fs::create_dir(reports.join("dir.html")).unwrap();
        let mut names: Vec<String> = read(&reports).into_iter().map(|report| report.name).collect();
        names.sort();
        assert_eq!(names, ["a.html", "b <x>.html"]);
        assert_eq!(one(&reports, "a.html").as_deref(), Some(b"a.html".as_slice()));
        for name in
            ["../secret.html", "link.html", "dir.html", ".hidden.html", "notes.txt", "no.html", "/etc/passwd"]
        {
            assert_eq!(one(&reports, name), None, "{name}");
        }
        assert_eq!(address("b <x>.html"), "/page/reports/b%20%3Cx%3E.html");
        let model = ModelName::new("a b'; rm -rf /");
        let html = view(&read(&reports), &reports, [&model].into_iter()).into_string();
        assert!(!html.contains("<x>") && html.contains("a_b___rm_-rf__.html"), "{html}");
    }
}
