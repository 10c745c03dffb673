//! Style and script of the page, compiled into the program. The style is inline in each page, and its hash
//! is in the page's content security policy. The script is a file named by a hash of its content,
//! compressed at its first use.

use std::io::Write as _;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

/// The script, its parts in order of dependency. All parts are one module, because each file costs a
/// request. Keyboard shortcuts work at once; the rest of the script starts after the first frame, which
/// does not need it.
const SCRIPT: &str = concat!(
    include_str!("files/keys.js"),
    "requestAnimationFrame(() => setTimeout(() => {\ndocument.body.dataset.drawn = \"\";\n",
    include_str!("files/time.js"),
    include_str!("files/morph.js"),
    include_str!("files/cursor.js"),
    include_str!("files/live.js"),
    "}));\n",
);

/// A file that browsers may store for ever.
#[derive(Debug)]
pub(crate) struct PageFile {
    /// URL path; contains a hash of the content, so that the file of a path never changes.
    pub(crate) path: String,
    pub(crate) kind: &'static str,
    pub(crate) plain: Bytes,
    pub(crate) gzip: Bytes,
}

/// The style, inline in each page: a separate request takes 15 to 30 milliseconds, in which a browser may
/// lay out the whole page without the style (docs/page.md).
#[derive(Debug)]
pub(crate) struct PageStyle {
    pub(crate) text: String,
    /// Hash of the style for the content security policy: `sha256-...`.
    pub(crate) digest: String,
}

#[derive(Debug)]
pub(crate) struct PageFiles {
    pub(crate) style: PageStyle,
    pub(crate) script: PageFile,
    /// Identifies the version of style and script.
    pub(crate) tag: String,
}

pub(crate) fn page_files() -> &'static PageFiles {
    static FILES: LazyLock<PageFiles> = LazyLock::new(|| {
        let text = [crate::markup::style::CSS, include_str!("files/page.css")].concat();
        let digest = format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(&text)));
        let style = PageStyle { text, digest };
        let script = PageFile {
            path: format!("/page/files/page.{}.js", content_hash(SCRIPT.as_bytes())),
            kind: "text/javascript; charset=utf-8",
            plain: Bytes::from_static(SCRIPT.as_bytes()),
            gzip: gzip(SCRIPT.as_bytes(), Compression::best()),
        };
        let tag = content_hash(&[style.digest.as_bytes(), script.path.as_bytes()].concat());
        PageFiles { style, script, tag }
    });
    &FILES
}

pub(crate) fn find_file(name: &str) -> Option<&'static PageFile> {
    let PageFiles { script, .. } = page_files();
    (script.path.strip_prefix("/page/files/") == Some(name)).then_some(script)
}

pub(crate) fn content_hash(content: &[u8]) -> String {
    let mut text = hex::encode(Sha256::digest(content));
    text.truncate(12);
    text
}

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
        let PageFiles { style, script, .. } = page_files();
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
        assert_eq!(find_file(name).unwrap().path, script.path);
        assert!(find_file("page.js").is_none() && find_file("").is_none());
    }
}
