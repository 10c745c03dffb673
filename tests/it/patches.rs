//! Patch sets on an invented tree: checked, applied, exported, and followed over a history, always as a whole.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use warden_patches::set::fingerprints::add_versions;
use warden_patches::{FolderTree, SetCatalogue, SourceRevision, fingerprint};
use warden_rig::home::Ran;
use warden_rig::{Context as _, Home, Outcome, Trouble};

const SOON: Duration = Duration::from_secs(30);

const SET: &str = r#"schema = 1
id = "demo"
title = "Counts what runs"
backends = ["cpu"]

[[sidecar]]
file = "demo.h"
beside = "include"

[[hook]]
id = "include"
files = ["src/engine.cpp", "src/old-engine.cpp"]
container = { kind = "function", name = "run" }
at = "before-container"
insert = ['#include "demo.h"']

[[hook]]
id = "end"
files = ["src/engine.cpp", "src/old-engine.cpp"]
container = { kind = "function", name = "run" }
anchor = "return total;"
at = "before"
insert = ["demo::count(total);"]

[[seam]]
id = "run"
files = ["src/engine.cpp", "src/old-engine.cpp"]
container = { kind = "function", name = "run" }

[[fix]]
id = "counting"
title = "Counts"
symptom = "nobody knows how many"
references = ["https://example.com/1"]
marker = "demo fix counting"

[[fix.variable]]
name = "LLAMA_WARDEN_DEMO"
type = "integer"
default = 16
min = 1
max = 100
unit = "runs"

[[fix.evidence]]
effect = "it counts"
"#;

const ENGINE: &str = "#include <cstdio>\r\n\r\nint run(int n) {\r\n    int total = 0;\r\n    for (int i = 0; i < n; i++) {\r\n        \
                      total += i;\r\n    }\r\n    return total;\r\n}";

/// A home with an invented llama.cpp in `tree`, and the set `demo` in `sets`, which knows this version.
fn home() -> Result<Home, Trouble> {
    let home = Home::new()?;
    for name in ["CMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"] {
        home.file(&format!("tree/vendor/llama.cpp/{name}"), "# nothing\n")?;
    }
    home.file("tree/vendor/llama.cpp/src/engine.cpp", ENGINE)?;
    home.file("sets/demo/set.toml", SET)?;
    home.file("sets/demo/demo.h", "#pragma once\nnamespace demo { inline void count(int) {} }\n")?;
    home.file("sets/demo/fingerprints.json", r#"{"schema":1,"seams":{}}"#)?;
    let [set, tree] = ["sets/demo", "tree/vendor/llama.cpp"].map(|path| home.path().join(path));
    learn(&set, &tree, "b100")?;
    Ok(home)
}

/// Takes the set `demo` out of the tree.
fn restore(home: &Home) -> Outcome {
    home.file("tree/vendor/llama.cpp/src/engine.cpp", ENGINE)?;
    std::fs::remove_file(home.path().join("tree/vendor/llama.cpp/src/demo.h"))?;
    Ok(())
}

/// Adds a version's fingerprints to the set in a folder, as a maintainer does after a review.
fn learn(folder: &Path, tree: &Path, label: &str) -> Outcome {
    let id = folder.file_name().and_then(OsStr::to_str).context("the id of a set")?;
    let curated = SetCatalogue::embedded()?;
    let sets =
        if curated.set(id).is_some() { curated } else { SetCatalogue::default().with_folder(folder)? };
    let set = sets.require(id)?;
    let tree = FolderTree::new(tree, SourceRevision::default());
    let known = add_versions(&set.fingerprints, &fingerprint(set, &tree)?, label, "", "llama.cpp");
    assert_ne!(known, set.fingerprints, "nothing is new");
    std::fs::write(folder.join("fingerprints.json"), known.to_json()?)?;
    Ok(())
}

/// `WARDEN_REVIEWED="SET TREE LABEL"`, with the folders of a set and of llama.cpp, adds the versions of that tree to
/// the set's `fingerprints.json`, for maintainers after a review.
#[test]
fn a_reviewed_version_is_added_on_request() -> Outcome {
    let Ok(words) = std::env::var("WARDEN_REVIEWED") else { return Ok(()) };
    let [set, tree, label] = words.split(' ').collect::<Vec<_>>()[..] else {
        return Err(Trouble::new(format!("WARDEN_REVIEWED={words}: write SET TREE LABEL")));
    };
    learn(Path::new(set), Path::new(tree), label)
}

/// Runs `patches` with the sets of the home; checks the exit code.
async fn patches(home: &Home, args: &[&str], code: i32) -> Result<Ran, Trouble> {
    let mut all = vec!["patches", args[0]];
    all.extend(&args[1..]);
    all.extend(["--patches", "sets"]);
    let ran = home.warden(&all, SOON).await?;
    if ran.code != code || ran.all().contains("panicked") {
        return Err(Trouble::new(format!("{all:?}: code {} instead of {code}: {ran:?}", ran.code)));
    }
    if code != 0 && !(ran.stderr.contains("error: ") && ran.stderr.contains("hint: ")) {
        return Err(Trouble::new(format!("{all:?}: no error with a hint: {ran:?}")));
    }
    Ok(ran)
}

async fn json(home: &Home, args: &[&str], code: i32) -> Result<Value, Trouble> {
    let ran = patches(home, &[args, &["--json"]].concat(), code).await?;
    serde_json::from_str(&ran.stdout).context(ran.stdout)
}

const DEMO: [&str; 2] = ["--patch-set", "demo"];

/// Rows of a check as `patch status`.
fn rows(value: &Value) -> Vec<String> {
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let rows = value.as_array().map(Vec::as_slice).unwrap_or_default();
    rows.iter().map(|row| format!("{} {}", text(row, "patch"), text(row, "status"))).collect()
}

fn snapshot(root: &Path) -> Result<BTreeMap<String, Vec<u8>>, Trouble> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.display().to_string(), std::fs::read(&path)?);
            }
        }
    }
    Ok(found)
}

#[tokio::test]
async fn sets_are_listed_and_shown_with_what_they_insert() -> Outcome {
    let home = home()?;
    let list = json(&home, &["list"], 0).await?;
    let ids: Vec<&str> = list.as_array().into_iter().flatten().filter_map(|set| set["id"].as_str()).collect();
    assert!(ids.contains(&"demo") && ids.contains(&"cuda-memory"), "{ids:?}");
    assert!(patches(&home, &["list"], 0).await?.stdout.contains("demo/counting"));
    let shown = patches(&home, &["show", "demo"], 0).await?.stdout;
    for part in [
        "+ demo::count(total); // llama-warden:demo/end",
        "before `return total;`",
        "LLAMA_WARDEN_DEMO",
        "1 to 100",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let fix = json(&home, &["show", "demo/counting"], 0).await?;
    assert_eq!(fix["fix"]["variable"][0]["default"], 16);
    assert_eq!(json(&home, &["show", "counting"], 0).await?, fix);
    assert_eq!(json(&home, &["show", "demo"], 0).await?["hooks"][1]["anchor"], "return total;");
    patches(&home, &["show", "nothing"], 2).await?;
    Ok(())
}

#[tokio::test]
async fn a_check_has_a_row_for_each_fix_and_the_code_of_the_worst() -> Outcome {
    let home = home()?;
    let check = |more: &'static [&'static str]| [&["check", "--source", "tree"], &DEMO[..], more].concat();
    let value = json(&home, &check(&[]), 0).await?;
    assert_eq!(rows(&value), ["demo/counting verified"]);
    let keys: Vec<&String> = value[0].as_object().context("an object")?.keys().collect();
    assert_eq!(keys, ["revision", "patch", "status", "reason"]);
    assert_eq!(rows(&json(&home, &check(&["--sets"]), 0).await?), ["demo verified"]);
    // A further statement: hooks are known, the code is not.
    let engine = "tree/vendor/llama.cpp/src/engine.cpp";
    home.file(engine, ENGINE.replace("int total = 0;", "int total = 0; total += 7;"))?;
    let value = json(&home, &check(&[]), 3).await?;
    assert_eq!(rows(&value), ["demo/counting unverified"]);
    assert!(value[0]["reason"].as_str().is_some_and(|why| why.contains("engine.cpp:")), "{value}");
    json(&home, &check(&["--allow-unverified"]), 0).await?;
    // A second anchor is refused, whatever is allowed.
    home.file(engine, ENGINE.replace("int total = 0;", "int total = 0; if (n < 0) { return total; }"))?;
    let value = json(&home, &check(&["--allow-unverified"]), 3).await?;
    assert_eq!(rows(&value), ["demo/counting refused"]);
    assert!(patches(&home, &check(&[]), 3).await?.stdout.contains("refused"));
    Ok(())
}

#[tokio::test]
async fn applied_twice_is_refused() -> Outcome {
    let home = home()?;
    let tree = home.path().join("tree");
    let before = snapshot(&tree)?;
    let apply = |more: &'static [&'static str]| [&["apply", "--source", "tree"], &DEMO[..], more].concat();
    let planned = patches(&home, &apply(&["--plan"]), 0).await?.stdout;
    assert!(planned.contains("src/engine.cpp:9: demo::count(total); // llama-warden:demo/end"), "{planned}");
    assert_eq!(snapshot(&tree)?, before, "a plan writes nothing");
    let value = json(&home, &apply(&[]), 0).await?;
    assert_eq!(value["outcome"], "written");
    assert_eq!(value["files"].as_array().map(Vec::len), Some(2));
    let patched = snapshot(&tree)?;
    let engine = std::fs::read_to_string(tree.join("vendor/llama.cpp/src/engine.cpp"))?;
    assert!(
        engine.contains("    demo::count(total); // llama-warden:demo/end\r\n    return total;\r\n}"),
        "{engine}"
    );
    assert!(tree.join("vendor/llama.cpp/src/demo.h").exists());
    assert_eq!(json(&home, &apply(&[]), 3).await?["outcome"], "refused");
    assert!(patches(&home, &apply(&[]), 3).await?.stderr.contains("is here already: restore the file first"));
    assert_eq!(snapshot(&tree)?, patched);
    Ok(())
}

#[tokio::test]
async fn what_apply_and_export_print_is_a_page() -> Outcome {
    let home = home()?;
    let engine = "tree/vendor/llama.cpp/src/engine.cpp";
    repository(&home, &[ENGINE]).await?;
    let mut pages = String::new();
    let apply = |more: &'static [&'static str]| [&["apply", "--source", "tree"], &DEMO[..], more].concat();
    let mut told = async |args: &[&str], code| {
        let page = crate::pages::page(home.path(), &patches(&home, args, code).await?);
        pages.extend(["$ patches ", &args.join(" "), "\n", &page, "\n"]);
        Ok::<_, Trouble>(())
    };
    let export = ["export", "--git", "tree", "--ref", "b1", "--patch-set", "demo", "-o", "out"];
    told(&export, 0).await?;
    home.file("out/0001-demo.patch", "mine")?;
    told(&export, 1).await?;
    told(&apply(&["--plan"]), 0).await?;
    told(&apply(&[]), 0).await?;
    told(&apply(&[]), 3).await?;
    restore(&home)?;
    told(&["check", "--source", "tree", "--patch-set", "demo"], 0).await?;
    home.file(engine, ENGINE.replace("int total = 0;", "int total = 5;"))?;
    told(&apply(&[]), 3).await?;
    told(&["check", "--source", "tree", "--patch-set", "demo"], 3).await?;
    told(&apply(&["--allow-unverified"]), 0).await?;
    restore(&home)?;
    home.file(engine, ENGINE.replace("int run", "int walk"))?;
    told(&apply(&[]), 3).await?;
    insta::assert_snapshot!(pages);
    Ok(())
}

#[tokio::test]
async fn what_is_refused_is_left_as_it_is_and_named() -> Outcome {
    let home = home()?;
    let tree = home.path().join("tree");
    let engine = "tree/vendor/llama.cpp/src/engine.cpp";
    let apply = |more: &'static [&'static str]| [&["apply", "--source", "tree"], &DEMO[..], more].concat();
    // Unknown code is patched only if allowed.
    home.file(engine, ENGINE.replace("int total = 0;", "int total = 5;"))?;
    let before = snapshot(&tree)?;
    assert_eq!(json(&home, &apply(&[]), 3).await?["outcome"], "refused");
    assert!(patches(&home, &apply(&[]), 3).await?.stderr.contains("--allow-unverified"));
    assert_eq!(snapshot(&tree)?, before);
    patches(&home, &apply(&["--allow-unverified"]), 0).await?;
    // Folders that are no tree or do not exist.
    patches(&home, &["apply", "--source", "sets"], 2).await?;
    patches(&home, &["apply", "--source", "/no/such/folder"], 2).await?;
    patches(&home, &["apply", "--source", "tree", "--patch-set", "nothing"], 2).await?;
    patches(&home, &["apply", "--source", "tree", "--backend", "abacus"], 2).await?;
    home.file("sets/demo/set.toml", SET.replace("anchor =", "anker ="))?;
    assert!(patches(&home, &["list"], 2).await?.stderr.contains("set.toml:"));
    Ok(())
}

#[tokio::test]
async fn a_users_diff_is_placed_strictly_or_not_at_all() -> Outcome {
    let home = home()?;
    let set = "schema = 1\nid = \"mine\"\ntitle = \"t\"\n\n[[diff]]\nfile = \"mine.patch\"\nfirst = \"b100\"\nlast = \"b200\"\n";
    home.file("sets/mine/set.toml", set)?;
    let diff = "--- a/CMakeLists.txt\n+++ b/CMakeLists.txt\n@@ -1 +1,2 @@\n # nothing\n+# something\n";
    home.file("sets/mine/mine.patch", diff)?;
    let args = ["--source", "tree", "--patch-set", "mine"];
    // The tree does not tell its build.
    let unknown = json(&home, &[&["check"], &args[..]].concat(), 3).await?;
    assert_eq!(rows(&unknown), ["mine unverified"]);
    let info = "tree/vendor/llama.cpp/common/build-info.cpp";
    home.file(info, "int LLAMA_BUILD_NUMBER = 150;\n")?;
    assert_eq!(rows(&json(&home, &[&["check"], &args[..]].concat(), 0).await?), ["mine verified"]);
    patches(&home, &[&["apply"], &args[..]].concat(), 0).await?;
    let changed = std::fs::read_to_string(home.path().join("tree/vendor/llama.cpp/CMakeLists.txt"))?;
    assert_eq!(changed, "# nothing\n# something\n");
    home.file("tree/vendor/llama.cpp/CMakeLists.txt", "\n# nothing\n")?;
    let ran = patches(&home, &[&["apply"], &args[..]].concat(), 3).await?;
    assert!(ran.stderr.contains("CMakeLists.txt:1: "), "{ran:?}");
    home.file(info, "int LLAMA_BUILD_NUMBER = 250;\n")?;
    let outside = json(&home, &[&["check"], &args[..]].concat(), 0).await?;
    assert_eq!(rows(&outside), ["mine not-applicable"]);
    Ok(())
}

/// A repository with a commit for each state of the engine, with build tags from b1 on.
async fn repository(home: &Home, states: &[&str]) -> Outcome {
    let git = async |args: &[&str]| {
        let config = ["-C", "tree", "-c", "user.name=t", "-c", "user.email=t@example.com"];
        let ran = home.run("git".as_ref(), [&config, args].concat(), SOON).await?;
        if ran.code == 0 { Ok(ran) } else { Err(Trouble::new(format!("git {args:?}: {ran:?}"))) }
    };
    git(&["init", "-q", "-b", "master"]).await?;
    for (index, state) in states.iter().enumerate() {
        home.file("tree/vendor/llama.cpp/src/engine.cpp", state)?;
        git(&["add", "."]).await?;
        git(&["commit", "-q", "--allow-empty", "-m", "x"]).await?;
        git(&["tag", &format!("b{}", index + 1)]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn over_a_history_every_commit_is_judged() -> Outcome {
    let home = home()?;
    let other = ENGINE.replace("total += i;", "total -= i;");
    let twice = ENGINE.replace("int total = 0;", "int total = 0; if (n < 0) { return total; }");
    // The set breaks, fits again, and breaks again.
    let states = [ENGINE, ENGINE, &other, ENGINE, ENGINE, &twice, &twice];
    repository(&home, &states).await?;
    let range = ["--git", "tree", "--range", "b1..b7", "--patch-set", "demo"];
    let value = json(&home, &[&["check"], &range[..]].concat(), 3).await?;
    let statuses: Vec<&str> =
        value.as_array().into_iter().flatten().filter_map(|row| row["status"].as_str()).collect();
    assert_eq!(statuses, ["verified", "unverified", "verified", "verified", "refused", "refused"]);
    let table = patches(&home, &[&["check"], &range[..]].concat(), 3).await?.stdout;
    assert!(table.contains("b4..b5  ") && table.contains("b6..b7  "), "{table}");
    let every = json(&home, &[&["check"], &range[..], &["--every", "2"]].concat(), 3).await?;
    assert_eq!(every.as_array().map(Vec::len), Some(3));
    let one = json(&home, &["check", "--git", "tree", "--ref", "b4", "--patch-set", "demo"], 0).await?;
    assert_eq!(one[0]["revision"], "b4");
    patches(&home, &["check", "--git", "tree", "--range", "b1"], 2).await?;
    patches(&home, &["check", "--git", "tree", "--ref", "b1", "--range", "b1..b2"], 2).await?;
    Ok(())
}

#[tokio::test]
async fn an_exported_series_makes_what_we_would_write() -> Outcome {
    let home = home()?;
    repository(&home, &[ENGINE]).await?;
    let export = ["export", "--git", "tree", "--ref", "b1", "--patch-set", "demo", "-o", "out"];
    let value = json(&home, &export, 0).await?;
    assert_eq!(value["patches"][0]["path"], "out/0001-demo.patch");
    assert_eq!(value["patches"][0]["crlf"], true);
    let first = std::fs::read(home.path().join("out/0001-demo.patch"))?;
    patches(&home, &export, 0).await?;
    assert_eq!(std::fs::read(home.path().join("out/0001-demo.patch"))?, first);
    // The exported patch applies to llama.cpp's own folder.
    let copy = home.run("cp".as_ref(), ["-r", "tree/vendor/llama.cpp", "plain"], SOON).await?;
    assert_eq!(copy.code, 0, "{copy:?}");
    let patch = home.path().join("out/0001-demo.patch");
    let patch = patch.to_str().context("a path that is text")?;
    let applied = home.run("git".as_ref(), ["-C", "plain", "apply", patch], SOON).await?;
    assert_eq!(applied.code, 0, "{applied:?}");
    patches(&home, &["apply", "--source", "tree", "--patch-set", "demo"], 0).await?;
    for name in ["src/engine.cpp", "src/demo.h"] {
        let (theirs, ours) =
            (home.path().join("plain").join(name), home.path().join("tree/vendor/llama.cpp").join(name));
        assert_eq!(std::fs::read(theirs)?, std::fs::read(ours)?, "{name}");
    }
    home.file("out/0001-demo.patch", "mine")?;
    patches(&home, &export, 1).await?;
    Ok(())
}
