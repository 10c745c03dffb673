//! Features of sources, and the choice of extras on machines with different tools.

use warden_patches::SourceRevision;

use super::*;

struct Files<'a>(Vec<(&'a str, &'a str)>);

impl SourceTree for Files<'_> {
    fn read(&self, path: &str) -> warden_patches::Result<Option<Vec<u8>>> {
        let found = self.0.iter().find(|(name, _)| *name == path);
        Ok(found.map(|(_, text)| text.as_bytes().to_vec()))
    }

    fn revision(&self) -> SourceRevision {
        SourceRevision::default()
    }
}

fn offers(files: &[(&str, &str)], server: &str) -> SourceFeatures {
    SourceFeatures::inspect(&Files(files.to_vec()), server).unwrap()
}

const OPENSSL: (&str, &str) = ("CMakeLists.txt", "option(LLAMA_OPENSSL x ON)\noption(LLAMA_BUILD_UI x ON)");

/// A source whose page is made by npm.
const UI: [(&str, &str); 8] = [
    OPENSSL,
    ("tools/ui/CMakeLists.txt", "add_executable(llama-ui-embed embed.cpp)"),
    ("tools/ui/embed.cpp", "x"),
    ("tools/ui/package.json", "{}"),
    ("tools/ui/package-lock.json", "{}"),
    ("tools/ui/svelte.config.js", "x"),
    ("tools/ui/src/app.html", "x"),
    ("scripts/ui-assets.cmake", "x"),
];

fn without<'a>(files: &[(&'a str, &'a str)], gone: &str) -> Vec<(&'a str, &'a str)> {
    files.iter().copied().filter(|(name, _)| *name != gone).collect()
}

/// [`UI`] with different text in one file.
fn ui_with(changed: &str, text: &'static str) -> Vec<(&'static str, &'static str)> {
    UI.iter().map(|(name, own)| (*name, if *name == changed { text } else { own })).collect()
}

#[test]
fn what_a_source_offers_is_seen_by_its_files() {
    let list = "set(PUBLIC_ASSETS\n    index.html.gz # the page\n    loading.html\n)\nforeach(x)";
    let old = [
        ("CMakeLists.txt", "option(LLAMA_CURL x OFF)"),
        ("examples/server/CMakeLists.txt", list),
        ("examples/server/public/index.html.gz", "x"),
        ("examples/server/public/loading.html", "x"),
    ];
    let found = offers(&old, "examples/server");
    assert_eq!(
        (found.page, found.fetches, found.old_switch),
        (PageOrigin::Ready, DownloadLibrary::Curl, false)
    );
    let found = offers(&without(&old, old[3].0), "examples/server");
    assert_eq!(found.page, PageOrigin::Lacks(old[3].0.into()));
    let bundle = [
        ("CMakeLists.txt", "option(LLAMA_OPENSSL x ON)\noption(LLAMA_CURL x ON)"),
        ("tools/server/CMakeLists.txt", "option(LLAMA_BUILD_WEBUI x ON)\nset(PUBLIC_ASSETS bundle.js)"),
    ];
    let found = offers(&bundle, "tools/server");
    assert_eq!(found.page, PageOrigin::Lacks("tools/server/public/bundle.js".into()));
    assert_eq!((found.fetches, found.old_switch, found.stand_in), (DownloadLibrary::OpenSsl, true, false));
    let found = offers(&UI, "tools/server");
    assert_eq!(
        found,
        SourceFeatures {
            page: PageOrigin::Npm,
            fetches: DownloadLibrary::OpenSsl,
            ..SourceFeatures::default()
        }
    );
    let either = "if(LLAMA_BUILD_WEBUI OR LLAMA_BUILD_UI)\n  add_executable(e embed.cpp)\nendif()";
    let both = ui_with("tools/ui/CMakeLists.txt", either);
    let found = offers(&both, "tools/server");
    assert_eq!((&found.page, found.old_switch), (&PageOrigin::Npm, true), "either name makes the page there");
    let none = ExtraTools { npm: Err("npm is not here".into()), library: None };
    assert!(choose_extras(&found, &none, |_| false).old_switch_off);
    assert!(!choose_extras(&offers(&UI, "tools/server"), &none, |_| false).old_switch_off);
    let with_dist = [&UI[..], &[("tools/ui/dist/index.html", "x")]].concat();
    assert_eq!(offers(&with_dist, "tools/server").page, PageOrigin::Ready);
    assert_eq!(offers(&[], "tools/server"), SourceFeatures::default());
}

#[test]
fn a_source_that_lacks_a_part_of_its_page_is_built_without_it() {
    for gone in [
        "tools/ui/package-lock.json",
        "tools/ui/svelte.config.js",
        "tools/ui/src/app.html",
        "tools/ui/package.json",
    ] {
        let found = offers(&without(&UI, gone), "tools/server");
        assert_eq!((found.page, found.stand_in), (PageOrigin::Lacks(gone.into()), false), "{gone}");
    }
    // Files that are compiled even without a page.
    for gone in ["tools/ui/embed.cpp", "scripts/ui-assets.cmake"] {
        let found = offers(&without(&UI, gone), "tools/server");
        assert_eq!(
            (found.page, found.stand_in),
            (PageOrigin::Lacks("tools/ui/embed.cpp".into()), true),
            "{gone}"
        );
    }
    let lacks =
        SourceFeatures { page: PageOrigin::Lacks("a/b".into()), stand_in: true, ..SourceFeatures::default() };
    let tools = ExtraTools { npm: Ok("npm 10".into()), library: None };
    let choice = choose_extras(&lacks, &tools, |_| false);
    assert!(!choice.npm && choice.words.stand_in && !choice.old_switch_off);
    assert_eq!(choice.words.page, "none: this source lacks a/b, of which it is made");
    assert_eq!(choice.versions, [PLACEHOLDER_RECIPE_ENTRY]);
    let old = SourceFeatures { old_switch: true, stand_in: false, ..lacks };
    assert!(choose_extras(&old, &tools, |_| false).old_switch_off);
    assert!(
        choose_extras(&old, &tools, |option| option == PAGE_OPTION).old_switch_off,
        "by the name that it has now"
    );
    assert!(
        !choose_extras(&old, &tools, |option| option == OLD_PAGE_OPTION).old_switch_off,
        "as it was decided"
    );
}

#[test]
fn a_source_that_does_not_compile_without_a_page_gets_a_library_without_one() {
    let broken = ui_with("tools/ui/embed.cpp", "std::string asset_dir = argv[3];");
    let found = offers(&broken, "tools/server");
    assert_eq!((&found.page, found.stand_in, found.needs_page), (&PageOrigin::Npm, false, true));
    let none = ExtraTools { npm: Err("npm is not here".into()), library: None };
    assert!(choose_extras(&found, &none, |_| false).words.stand_in);
    let npm = ExtraTools { npm: Ok("npm 10".into()), ..none };
    let choice = choose_extras(&found, &npm, |_| false);
    assert!(choice.npm && !choice.words.stand_in);
    assert!(choose_extras(&found, &npm, |option| option == PAGE_OPTION).words.stand_in, "it was turned off");
    let with_dist = [&broken[..], &[("tools/ui/dist/index.html", "x")]].concat();
    let ready = offers(&with_dist, "tools/server");
    assert!(!choose_extras(&ready, &npm, |_| false).words.stand_in);
}

#[test]
fn what_can_be_had_is_built_in_and_what_cannot_is_said_with_its_cure() {
    let all = SourceFeatures {
        page: PageOrigin::Npm,
        fetches: DownloadLibrary::OpenSsl,
        ..SourceFeatures::default()
    };
    let tools = ExtraTools { npm: Ok("npm 10.8.2".to_owned()), library: Some("OpenSSL 3.0".to_owned()) };
    let none = ExtraTools { npm: Err("there is none here".to_owned()), library: None };
    let both = choose_extras(&all, &tools, |_| false);
    assert!(both.npm && both.linked == DownloadLibrary::OpenSsl);
    assert_eq!(both.versions, ["npm 10.8.2", "OpenSSL 3.0"]);
    let bare = choose_extras(&all, &none, |_| false);
    assert!(!bare.npm && bare.linked == DownloadLibrary::None && bare.versions.is_empty());
    assert_eq!(bare.words.page, "none: npm makes it, and there is none here");
    assert!(bare.words.https.contains("apt install libssl-dev"), "{}", bare.words.https);
    let decided = choose_extras(&all, &tools, |option| option != CURL_OPTION);
    assert!(!decided.npm && decided.linked == DownloadLibrary::None && decided.versions.is_empty());
}

#[test]
fn a_source_that_fetches_through_libcurl_gets_it_where_it_is() {
    let old = SourceFeatures {
        page: PageOrigin::Ready,
        fetches: DownloadLibrary::Curl,
        ..SourceFeatures::default()
    };
    let mut tools = ExtraTools { npm: Ok("npm 10.8.2".to_owned()), library: Some("libcurl 7.88".to_owned()) };
    let choice = choose_extras(&old, &tools, |_| false);
    assert_eq!(choice.linked, DownloadLibrary::Curl);
    assert_eq!(choice.versions, ["libcurl 7.88"], "nothing of the others goes into it");
    assert_eq!(choice.words.https, "through libcurl 7.88 of this machine");
    tools.library = None;
    let choice = choose_extras(&old, &tools, |_| false);
    assert!(choice.linked == DownloadLibrary::None && choice.versions.is_empty());
    assert!(choice.words.https.contains("`-hf` fetches nothing: apt install libcurl4-openssl-dev"));
    let nothing = choose_extras(&SourceFeatures::default(), &tools, |_| false);
    assert!(nothing.words.https.contains("fetches no models"));
}
