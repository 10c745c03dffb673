//! What a llama-server has beside serving: its web page, and HTTPS, by which `-hf` fetches models. Each is built in where it can
//! be had, and a sentence says which and why not.
//!
//! | the source has | the web page |
//! |---|---|
//! | what `server/CMakeLists.txt` lists as `PUBLIC_ASSETS`, in `server/public` (to about b9174) | is in the binary |
//! | `tools/ui/dist/index.html`, put there from a release | is in the binary |
//! | `tools/ui` whole (from about b9299 on) | is made by npm, where that is here; it fetches what `package-lock.json` names |
//! | less than that | there is none, and the sentence names what is missing |
//!
//! | the source knows | `-hf` fetches through |
//! |---|---|
//! | `LLAMA_OPENSSL` (from about b6600 on) | its own HTTP with the system's OpenSSL |
//! | `LLAMA_CURL` only (before, and ik_llama.cpp) | the system's libcurl |

use serde::{Deserialize, Serialize};
use warden_patches::Tree;

use crate::error::Result;
use crate::toolchain::extras::{Curl, Npm, OpenSsl};

/// The switch of cmake for the page.
pub(super) const PAGE_OPTION: &str = "LLAMA_BUILD_UI";
/// Its name in sources before there was `tools/ui`. Newer ones take it, too, and let it win.
pub(super) const OLD_PAGE_OPTION: &str = "LLAMA_BUILD_WEBUI";
/// The switch for HTTPS.
const HTTPS_OPTION: &str = "LLAMA_OPENSSL";
/// The same in sources before that, which fetched through libcurl.
const CURL_OPTION: &str = "LLAMA_CURL";
/// Of what npm makes the page, and what puts it into the binary. The first one says that there is a page.
const PAGE_PARTS: [&str; 5] = [
    "tools/ui/package.json",
    "tools/ui/package-lock.json",
    "tools/ui/svelte.config.js",
    "tools/ui/src/app.html",
    "scripts/ui-assets.cmake",
];
/// What `tools/ui/CMakeLists.txt` compiles, also where there is no page.
const EMBEDDER: &str = "tools/ui/embed.cpp";
/// Line of an [`EMBEDDER`] that ends with an error where there is no page to embed.
const NEEDS_PAGE: &str = "asset_dir = argv[3];";
/// In the recipe of a build with a stand-in for what is missing of `tools/ui`; raised when that changes.
const STAND_IN: &str = "stand-in for tools/ui 1";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offers {
    /// Where its web page comes from.
    pub(crate) page: Page,
    /// Whether it is the old switch that builds without a page.
    pub(crate) old_switch: bool,
    /// Whether it lacks what it compiles even without a page.
    pub(crate) stand_in: bool,
    /// Whether it does not compile without a page.
    pub(crate) needs_page: bool,
    /// By what it fetches models.
    pub(crate) fetches: Fetches,
}

/// Where a web page comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Page {
    #[default]
    None,
    /// There is one, but for this file.
    Lacks(String),
    /// It is in the source, ready.
    Ready,
    Npm,
}

/// By what a source fetches models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fetches {
    /// It does not.
    #[default]
    Nothing,
    Curl,
    OpenSsl,
}

/// What is built in, in words, and what that adds to the recipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extras {
    /// About the web page.
    pub page: String,
    /// About HTTPS.
    pub https: String,
    /// Whether `tools/ui` is replaced by a library without a page, because the source lacks a part of it or does not compile without one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stand_in: bool,
}

/// What of the machine can be built in.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    /// What makes the page, or why it is not made.
    pub(crate) npm: std::result::Result<Npm, String>,
    pub(crate) openssl: Option<OpenSsl>,
    /// The machine's libcurl.
    pub(crate) curl: Option<Curl>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) words: Extras,
    /// Whether npm makes the page.
    pub(super) npm: bool,
    /// Whether the old switch has to turn the page off.
    pub(super) old_switch_off: bool,
    /// What is linked for fetching models.
    pub(super) linked: Fetches,
    /// Versions of what makes or is linked, for the recipe.
    pub(super) versions: Vec<String>,
}

impl Offers {
    /// Whether npm has to make the page.
    pub(crate) fn needs_npm(&self) -> bool {
        self.page == Page::Npm
    }

    /// Looks. `server`: the server's folder in the source.
    pub(crate) fn of(tree: &dyn Tree, server: &str) -> Result<Self> {
        let there = |path: &str| -> Result<bool> { Ok(tree.read(path)?.is_some()) };
        let text = |path: &str| tree.read(path).map(Option::unwrap_or_default);
        let (list, servers) = (text("CMakeLists.txt")?, text(&format!("{server}/CMakeLists.txt"))?);
        let knows = |list: &[u8], option: &str| memchr::memmem::find(list, option.as_bytes()).is_some();
        let ui = text("tools/ui/CMakeLists.txt")?;
        let embeds = knows(&ui, "embed.cpp");
        let lacks_embedder = embeds && !(there(EMBEDDER)? && there("scripts/ui-assets.cmake")?);
        let needs_page = embeds && knows(&text(EMBEDDER)?, NEEDS_PAGE);
        let page = if embeds || there("tools/ui/package.json")? {
            if lacks_embedder {
                Page::Lacks(EMBEDDER.to_owned())
            } else if there("tools/ui/dist/index.html")? {
                Page::Ready
            } else {
                missing(&PAGE_PARTS.map(str::to_owned), &there)?.map_or(Page::Npm, Page::Lacks)
            }
        } else {
            let assets: Vec<String> =
                public_assets(&servers).iter().map(|name| format!("{server}/public/{name}")).collect();
            let gone = missing(&assets, &there)?;
            match gone {
                Some(file) => Page::Lacks(file),
                None if !assets.is_empty() => Page::Ready,
                None => Page::None,
            }
        };
        let fetches = if knows(&list, HTTPS_OPTION) {
            Fetches::OpenSsl
        } else if knows(&list, CURL_OPTION) {
            Fetches::Curl
        } else {
            Fetches::Nothing
        };
        // Some of those with both names make the page unless both say no.
        let either = knows(&ui, &format!("{OLD_PAGE_OPTION} OR {PAGE_OPTION}"));
        let old_switch = either
            || !knows(&list, PAGE_OPTION)
                && (knows(&list, OLD_PAGE_OPTION) || knows(&servers, OLD_PAGE_OPTION));
        Ok(Self { page, old_switch, stand_in: lacks_embedder, needs_page, fetches })
    }
}

/// The first of these files that is not there.
fn missing(files: &[String], there: &dyn Fn(&str) -> Result<bool>) -> Result<Option<String>> {
    for file in files {
        if !there(file)? {
            return Ok(Some(file.clone()));
        }
    }
    Ok(None)
}

/// The names in `set(PUBLIC_ASSETS ...)`: what goes into the binary from the folder `public`.
fn public_assets(list: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(list);
    let Some((_, rest)) = text.split_once("set(PUBLIC_ASSETS") else { return Vec::new() };
    let inside = rest.split(')').next().unwrap_or_default();
    let names = inside.lines().flat_map(|line| line.split('#').next().unwrap_or_default().split_whitespace());
    names.filter(|name| !name.contains('$')).map(str::to_owned).collect()
}

/// Chooses. `decided`: whether the user set an option of cmake.
pub(super) fn choose(offers: &Offers, tools: &Tools, decided: impl Fn(&str) -> bool) -> Choice {
    let mut choice = Choice::default();
    let own = [PAGE_OPTION, OLD_PAGE_OPTION].into_iter().any(&decided);
    choice.words.page = match (&offers.page, &tools.npm) {
        _ if own => {
            // Whoever says no says it to a source that knows the old name only, too.
            choice.old_switch_off = offers.old_switch && !decided(OLD_PAGE_OPTION);
            "as the options say".to_owned()
        }
        (Page::None, _) => "none: this source has none".to_owned(),
        (Page::Lacks(file), _) => {
            choice.old_switch_off = offers.old_switch;
            format!("none: this source lacks {file}, of which it is made")
        }
        (Page::Ready, _) => "in the source".to_owned(),
        (Page::Npm, Ok(npm)) => {
            choice.npm = true;
            choice.versions.push(npm.0.clone());
            format!("made by {}, which fetches what the source's package-lock.json names", npm.0)
        }
        (Page::Npm, Err(why)) => {
            choice.old_switch_off = offers.old_switch;
            format!("none: npm makes it, and {why}")
        }
    };
    let no_page = !choice.npm && offers.page != Page::Ready;
    if offers.stand_in || (offers.needs_page && no_page) {
        choice.words.stand_in = true;
        choice.versions.push(STAND_IN.to_owned());
    }
    let own = [HTTPS_OPTION, CURL_OPTION].into_iter().any(&decided);
    let nothing =
        |package: &str| format!("none, so `-hf` fetches nothing: apt install {package}, then build again");
    choice.words.https = match (offers.fetches, &tools.openssl, &tools.curl) {
        _ if own => "as the options say".to_owned(),
        (Fetches::Nothing, ..) => "none: this source fetches no models, with `-hf` or otherwise".to_owned(),
        (Fetches::OpenSsl, Some(openssl), _) => {
            choice.linked = Fetches::OpenSsl;
            choice.versions.push(openssl.0.clone());
            format!("through {} of this machine", openssl.0)
        }
        (Fetches::OpenSsl, None, _) => nothing("libssl-dev"),
        (Fetches::Curl, _, Some(curl)) => {
            choice.linked = Fetches::Curl;
            choice.versions.push(curl.0.clone());
            format!("through {} of this machine", curl.0)
        }
        (Fetches::Curl, _, None) => nothing("libcurl4-openssl-dev"),
    };
    choice
}

#[cfg(test)]
mod tests;
