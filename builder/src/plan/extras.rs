//! What a llama-server has beside serving: its web page, and HTTPS, by which `-hf` fetches models. Each is built in where it can
//! be had, and a sentence says which and why not.
//!
//! | the source has | the web page |
//! |---|---|
//! | `server/public/index.html` or `.gz` (to about b9440) | is in the binary |
//! | `tools/ui/dist/index.html`, put there from a release | is in the binary |
//! | `tools/ui/package.json` (since) | is made by npm, where that is here; it fetches what `package-lock.json` names |

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::patch::Tree;
use crate::toolchain::{Npm, OpenSsl};

/// Switches of cmake for the page, newest first. Who sets one has decided.
const PAGE_OPTIONS: [&str; 2] = ["LLAMA_BUILD_UI", "LLAMA_BUILD_WEBUI"];
/// The switch for HTTPS.
const HTTPS_OPTION: &str = "LLAMA_OPENSSL";
/// The same in sources before about b6800, which fetched through libcurl.
const CURL_OPTION: &str = "LLAMA_CURL";

/// What a source offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offers {
    /// Where its web page comes from.
    pub(crate) page: Page,
    /// Whether it can be built with OpenSSL.
    pub(crate) https: bool,
}

/// Where a web page comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Page {
    /// There is none.
    #[default]
    None,
    /// It is in the source, ready.
    Ready,
    /// npm makes it.
    Npm,
}

/// What is built in, in words, and what that adds to the recipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extras {
    /// About the web page.
    pub page: String,
    /// About HTTPS.
    pub https: String,
}

/// The choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) words: Extras,
    /// Whether npm makes the page.
    pub(super) npm: bool,
    /// Whether OpenSSL is linked.
    pub(super) openssl: bool,
    /// Versions of what makes or is linked, for the recipe.
    pub(super) versions: Vec<String>,
}

impl Offers {
    /// Whether npm has to make the page.
    pub(crate) fn needs_npm(self) -> bool {
        self.page == Page::Npm
    }

    /// Looks. `server`: the server's folder in the source.
    pub(crate) fn of(tree: &dyn Tree, server: &str) -> Result<Self> {
        let there = |path: &str| tree.read(path).map(|content| content.is_some());
        let page = if there("tools/ui/package.json")? {
            if there("tools/ui/dist/index.html")? { Page::Ready } else { Page::Npm }
        } else if there(&format!("{server}/public/index.html.gz"))?
            || there(&format!("{server}/public/index.html"))?
        {
            Page::Ready
        } else {
            Page::None
        };
        let list = tree.read("CMakeLists.txt")?.unwrap_or_default();
        let https = memchr::memmem::find(&list, HTTPS_OPTION.as_bytes()).is_some();
        Ok(Self { page, https })
    }
}

/// Chooses. `decided`: whether the user set an option of cmake.
pub(super) fn choose(
    offers: Offers,
    npm: Option<&Npm>,
    openssl: Option<&OpenSsl>,
    decided: impl Fn(&str) -> bool,
) -> Choice {
    let mut choice = Choice::default();
    choice.words.page = match (offers.page, npm) {
        _ if PAGE_OPTIONS.into_iter().any(&decided) => "as the options say".to_owned(),
        (Page::None, _) => "none: this source has none".to_owned(),
        (Page::Ready, _) => "in the source".to_owned(),
        (Page::Npm, Some(npm)) => {
            choice.npm = true;
            choice.versions.push(npm.0.clone());
            format!("made by {}, which fetches what the source's package-lock.json names", npm.0)
        }
        (Page::Npm, None) => {
            "none: npm makes it, and there is no npm here (apt install npm, or put the page of a \
                              release into tools/ui/dist of the source), then build again"
                .to_owned()
        }
    };
    choice.words.https = match openssl {
        _ if [HTTPS_OPTION, CURL_OPTION].into_iter().any(&decided) => "as the options say".to_owned(),
        _ if !offers.https => format!(
            "none: this source fetches through libcurl; with its headers here, build with -D{CURL_OPTION}=ON for `-hf`"
        ),
        Some(openssl) => {
            choice.openssl = true;
            choice.versions.push(openssl.0.clone());
            format!("through {} of this machine", openssl.0)
        }
        None => "none, so `-hf` fetches nothing: apt install libssl-dev, then build again".to_owned(),
    };
    choice
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Revision;

    /// Files by their names.
    struct Files<'a>(&'a [(&'a str, &'a str)]);

    impl Tree for Files<'_> {
        fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
            let found = self.0.iter().find(|(name, _)| *name == path);
            Ok(found.map(|(_, text)| text.as_bytes().to_vec()))
        }

        fn revision(&self) -> Revision {
            Revision::default()
        }
    }

    fn offers(files: &[(&str, &str)], server: &str) -> Offers {
        Offers::of(&Files(files), server).unwrap()
    }

    #[test]
    fn what_a_source_offers_is_told_by_its_files() {
        let old =
            [("CMakeLists.txt", "option(LLAMA_CURL x OFF)"), ("examples/server/public/index.html.gz", "x")];
        assert_eq!(offers(&old, "examples/server"), Offers { page: Page::Ready, https: false });
        let bundle =
            [("CMakeLists.txt", "option(LLAMA_OPENSSL x ON)"), ("tools/server/public/index.html", "x")];
        assert_eq!(offers(&bundle, "tools/server"), Offers { page: Page::Ready, https: true });
        let new = [("CMakeLists.txt", "option(LLAMA_OPENSSL x ON)"), ("tools/ui/package.json", "{}")];
        assert_eq!(offers(&new, "tools/server").page, Page::Npm);
        let with_dist = [new[0], new[1], ("tools/ui/dist/index.html", "x")];
        assert_eq!(offers(&with_dist, "tools/server").page, Page::Ready);
        assert_eq!(offers(&[], "tools/server"), Offers::default());
    }

    #[test]
    fn what_can_be_had_is_built_in_and_what_cannot_is_said_with_its_cure() {
        let (npm, openssl) = (Npm("npm 10.8.2".to_owned()), OpenSsl("OpenSSL 3.0".to_owned()));
        let all = Offers { page: Page::Npm, https: true };
        let both = choose(all, Some(&npm), Some(&openssl), |_| false);
        assert!(both.npm && both.openssl);
        assert_eq!(both.versions, ["npm 10.8.2", "OpenSSL 3.0"]);
        let bare = choose(all, None, None, |_| false);
        assert!(!bare.npm && !bare.openssl && bare.versions.is_empty());
        assert!(bare.words.page.contains("apt install npm"), "{}", bare.words.page);
        assert!(bare.words.https.contains("apt install libssl-dev"), "{}", bare.words.https);
        let decided = choose(all, Some(&npm), Some(&openssl), |option| option != CURL_OPTION);
        assert!(!decided.npm && !decided.openssl && decided.versions.is_empty());
        let old = choose(Offers { page: Page::Ready, https: false }, Some(&npm), Some(&openssl), |_| false);
        assert_eq!(old.versions, Vec::<String>::new(), "nothing of them goes into it");
        assert!(old.words.https.contains("-DLLAMA_CURL=ON"));
    }
}
