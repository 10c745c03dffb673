//! Style and script of the page, compiled in. The style stands in each page, named to the browser by its hash; the script is a file
//! that is named by what is in it, compressed at its first use.

use std::io::Write as _;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

/// The script, in the order in which its parts use each other. One module, because each file is a question to the server. Keys work at
/// once; all else begins when a first frame is there, which says all without it.
const SCRIPT: &str = concat!(
    include_str!("files/keys.js"),
    "requestAnimationFrame(() => setTimeout(() => {\ndocument.body.dataset.drawn = \"\";\n",
    include_str!("files/time.js"),
    include_str!("files/morph.js"),
    include_str!("files/cursor.js"),
    include_str!("files/live.js"),
    "}));\n",
);

/// A file.
#[derive(Debug)]
pub(crate) struct File {
    /// Where it is: with a hash of its content, so that it never changes.
    pub(crate) path: String,
    pub(crate) kind: &'static str,
    pub(crate) plain: Bytes,
    pub(crate) gzip: Bytes,
}

/// The style. It stands in the page because a browser that has nothing of ours asks for it in 15 to 30 milliseconds, within which it may
/// lay the whole page out without it (docs/page.md).
#[derive(Debug)]
pub(crate) struct Style {
    pub(crate) text: String,
    /// What the page's policy names it by: `sha256-...`.
    pub(crate) digest: String,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) style: Style,
    pub(crate) script: File,
    /// Differs where any of them does.
    pub(crate) tag: String,
}

/// All of them.
pub(crate) fn all() -> &'static Files {
    static FILES: LazyLock<Files> = LazyLock::new(|| {
        let text = [warden_pages::style::CSS, include_str!("files/page.css")].concat();
        let digest = format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(&text)));
        let style = Style { text, digest };
        let script = file("page", "js", "text/javascript; charset=utf-8", SCRIPT.to_owned());
        let tag = hash(&[style.digest.as_bytes(), script.path.as_bytes()].concat());
        Files { style, script, tag }
    });
    &FILES
}

/// The one of that name.
pub(crate) fn named(name: &str) -> Option<&'static File> {
    let Files { script, .. } = all();
    (script.path.strip_prefix("/page/files/") == Some(name)).then_some(script)
}

fn file(name: &str, end: &str, kind: &'static str, text: String) -> File {
    let path = format!("/page/files/{name}.{}.{end}", hash(text.as_bytes()));
    let gzip = gzip(text.as_bytes(), Compression::best());
    File { path, kind, plain: text.into(), gzip }
}

/// Twelve digits that tell contents apart.
pub(crate) fn hash(content: &[u8]) -> String {
    let mut text = hex::encode(Sha256::digest(content));
    text.truncate(12);
    text
}

/// Compressed as browsers take it.
pub(crate) fn gzip(content: &[u8], level: Compression) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(content.len() / 4), level);
    // Writing to memory cannot fail.
    drop(encoder.write_all(content));
    encoder.finish().unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_needs_nobody() {
        let Files { style, script, .. } = all();
        let compressed = gzip(style.text.as_bytes(), Compression::best());
        assert!(compressed.len() + script.gzip.len() < 40_000, "{} {}", compressed.len(), script.gzip.len());
        for text in [&style.text, std::str::from_utf8(&script.plain).unwrap()] {
            for banned in ["http://", "https://", "@import", "url(", "eval(", "innerHTML", "import("] {
                assert!(!text.contains(banned), "{banned}");
            }
        }
        assert!(
            !style.text.contains("</") && !style.text.contains('\r'),
            "it stands in a page, and its hash is that of what a browser reads"
        );
        let name = script.path.strip_prefix("/page/files/").unwrap();
        assert_eq!(named(name).unwrap().path, script.path);
        assert!(named("page.js").is_none() && named("").is_none());
    }
}
