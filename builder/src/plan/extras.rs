//! Chooses optional features of a llama-server: the web page, and HTTPS for `-hf` downloads. Each is built in
//! where possible; a sentence tells the user what is built in, or why not.
//!
//! | the source has | the web page |
//! |---|---|
//! | `PUBLIC_ASSETS` of `server/CMakeLists.txt` in `server/public` (to about b9174) | embedded |
//! | `tools/ui/dist/index.html`, copied from a release | embedded |
//! | `tools/ui` complete (from about b9299 on) | made by npm, if installed, with `package-lock.json` |
//! | less than that | none; the sentence names the missing file |
//!
//! | the source supports | `-hf` fetches through |
//! |---|---|
//! | `LLAMA_OPENSSL` (from about b6600 on) | its own HTTP with the system's OpenSSL |
//! | `LLAMA_CURL` only (before b6600, and ik_llama.cpp) | the system's libcurl |

use serde::{Deserialize, Serialize};
use warden_patches::SourceTree;

use crate::error::Result;

pub(super) const PAGE_OPTION: &str = "LLAMA_BUILD_UI";
/// Older name of [`PAGE_OPTION`], from before `tools/ui`. Newer sources accept both; the older one wins.
pub(super) const OLD_PAGE_OPTION: &str = "LLAMA_BUILD_WEBUI";
const HTTPS_OPTION: &str = "LLAMA_OPENSSL";
const CURL_OPTION: &str = "LLAMA_CURL";
/// Files needed to make and embed the page. The first one exists if the source has a page at all.
const PAGE_SOURCES: [&str; 5] = [
    "tools/ui/package.json",
    "tools/ui/package-lock.json",
    "tools/ui/svelte.config.js",
    "tools/ui/src/app.html",
    "scripts/ui-assets.cmake",
];
/// Source that `tools/ui/CMakeLists.txt` compiles even without a page.
const EMBEDDER: &str = "tools/ui/embed.cpp";
/// Line of an [`EMBEDDER`] that fails without a page to embed.
const PAGE_REQUIRED_MARKER: &str = "asset_dir = argv[3];";
/// Recipe entry of a build with placeholder files for `tools/ui`; to be changed with the placeholders.
const PLACEHOLDER_RECIPE_ENTRY: &str = "stand-in for tools/ui 1";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SourceFeatures {
    pub(crate) page: PageOrigin,
    /// Disabling the page requires setting [`OLD_PAGE_OPTION`] to off.
    pub(crate) old_switch: bool,
    /// The source lacks files of `tools/ui` that are compiled even without a page.
    pub(crate) stand_in: bool,
    pub(crate) needs_page: bool,
    pub(crate) fetches: DownloadLibrary,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum PageOrigin {
    #[default]
    None,
    Lacks(String),
    Ready,
    Npm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DownloadLibrary {
    #[default]
    None,
    Curl,
    OpenSsl,
}

/// Built-in features in words, and their part of the recipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildExtras {
    /// Sentence about the web page.
    pub page: String,
    /// Sentence about HTTPS.
    pub https: String,
    /// `tools/ui` is replaced by a library without a page, because it is incomplete or requires a page.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stand_in: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct ExtraTools {
    /// npm, or the reason why there is no page.
    pub(crate) npm: std::result::Result<String, String>,
    pub(crate) library: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ExtrasChoice {
    pub(super) words: BuildExtras,
    pub(super) npm: bool,
    pub(super) old_switch_off: bool,
    pub(super) linked: DownloadLibrary,
    pub(super) versions: Vec<String>,
}

impl SourceFeatures {
    pub(crate) fn needs_npm(&self) -> bool {
        self.page == PageOrigin::Npm
    }

    pub(crate) fn inspect(tree: &dyn SourceTree, server: &str) -> Result<Self> {
        let there = |path: &str| -> Result<bool> { Ok(tree.read(path)?.is_some()) };
        let text = |path: &str| tree.read(path).map(Option::unwrap_or_default);
        let (list, servers) = (text("CMakeLists.txt")?, text(&format!("{server}/CMakeLists.txt"))?);
        let knows = |list: &[u8], option: &str| memchr::memmem::find(list, option.as_bytes()).is_some();
        let ui = text("tools/ui/CMakeLists.txt")?;
        let embeds = knows(&ui, "embed.cpp");
        let lacks_embedder = embeds && !(there(EMBEDDER)? && there("scripts/ui-assets.cmake")?);
        let needs_page = embeds && knows(&text(EMBEDDER)?, PAGE_REQUIRED_MARKER);
        let page = if embeds || there("tools/ui/package.json")? {
            if lacks_embedder {
                PageOrigin::Lacks(EMBEDDER.to_owned())
            } else if there("tools/ui/dist/index.html")? {
                PageOrigin::Ready
            } else {
                first_missing(&PAGE_SOURCES.map(str::to_owned), &there)?
                    .map_or(PageOrigin::Npm, PageOrigin::Lacks)
            }
        } else {
            let assets: Vec<String> =
                public_assets(&servers).iter().map(|name| format!("{server}/public/{name}")).collect();
            let gone = first_missing(&assets, &there)?;
            match gone {
                Some(file) => PageOrigin::Lacks(file),
                None if !assets.is_empty() => PageOrigin::Ready,
                None => PageOrigin::None,
            }
        };
        let fetches = if knows(&list, HTTPS_OPTION) {
            DownloadLibrary::OpenSsl
        } else if knows(&list, CURL_OPTION) {
            DownloadLibrary::Curl
        } else {
            DownloadLibrary::None
        };
        // Some sources with both options make the page unless both are off.
        let either = knows(&ui, &format!("{OLD_PAGE_OPTION} OR {PAGE_OPTION}"));
        let old_switch = either
            || !knows(&list, PAGE_OPTION)
                && (knows(&list, OLD_PAGE_OPTION) || knows(&servers, OLD_PAGE_OPTION));
        Ok(Self { page, old_switch, stand_in: lacks_embedder, needs_page, fetches })
    }
}

fn first_missing(files: &[String], there: &dyn Fn(&str) -> Result<bool>) -> Result<Option<String>> {
    for file in files {
        if !there(file)? {
            return Ok(Some(file.clone()));
        }
    }
    Ok(None)
}

/// Parses the names in `set(PUBLIC_ASSETS ...)`, the files to embed from the folder `public`.
fn public_assets(list: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(list);
    let Some((_, rest)) = text.split_once("set(PUBLIC_ASSETS") else { return Vec::new() };
    let inside = rest.split(')').next().unwrap_or_default();
    let names = inside.lines().flat_map(|line| line.split('#').next().unwrap_or_default().split_whitespace());
    names.filter(|name| !name.contains('$')).map(str::to_owned).collect()
}

/// `decided` returns true for a cmake option that the user set.
pub(super) fn choose_extras(
    offers: &SourceFeatures,
    tools: &ExtraTools,
    decided: impl Fn(&str) -> bool,
) -> ExtrasChoice {
    let mut choice = ExtrasChoice::default();
    let own = [PAGE_OPTION, OLD_PAGE_OPTION].into_iter().any(&decided);
    choice.words.page = match (&offers.page, &tools.npm) {
        _ if own => {
            // A user's "off" also applies to a source that supports only the old name.
            choice.old_switch_off = offers.old_switch && !decided(OLD_PAGE_OPTION);
            "as the options say".to_owned()
        }
        (PageOrigin::None, _) => "none: this source has none".to_owned(),
        (PageOrigin::Lacks(file), _) => {
            choice.old_switch_off = offers.old_switch;
            format!("none: this source lacks {file}, of which it is made")
        }
        (PageOrigin::Ready, _) => "in the source".to_owned(),
        (PageOrigin::Npm, Ok(npm)) => {
            choice.npm = true;
            choice.versions.push(npm.clone());
            format!("made by {npm}, which fetches what the source's package-lock.json names")
        }
        (PageOrigin::Npm, Err(why)) => {
            choice.old_switch_off = offers.old_switch;
            format!("none: npm makes it, and {why}")
        }
    };
    let no_page = !choice.npm && offers.page != PageOrigin::Ready;
    if offers.stand_in || (offers.needs_page && no_page) {
        choice.words.stand_in = true;
        choice.versions.push(PLACEHOLDER_RECIPE_ENTRY.to_owned());
    }
    let own = [HTTPS_OPTION, CURL_OPTION].into_iter().any(&decided);
    let nothing =
        |package: &str| format!("none, so `-hf` fetches nothing: apt install {package}, then build again");
    choice.words.https = match (offers.fetches, &tools.library) {
        _ if own => "as the options say".to_owned(),
        (DownloadLibrary::None, _) => {
            "none: this source fetches no models, with `-hf` or otherwise".to_owned()
        }
        (linked, Some(library)) => {
            choice.linked = linked;
            choice.versions.push(library.clone());
            format!("through {library} of this machine")
        }
        (DownloadLibrary::OpenSsl, None) => nothing("libssl-dev"),
        (DownloadLibrary::Curl, None) => nothing("libcurl4-openssl-dev"),
    };
    choice
}

#[cfg(test)]
mod tests;
