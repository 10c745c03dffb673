//! Tests web pages that npm makes, fails to make or makes too slowly, and sources with an incomplete page.

use super::*;

/// A source whose page is made by npm.
const UI: [(&str, &str); 8] = [
    ("CMakeLists.txt", "option(LLAMA_BUILD_UI x ON)"),
    ("tools/ui/CMakeLists.txt", "add_executable(llama-ui-embed embed.cpp)"),
    ("tools/ui/embed.cpp", ""),
    ("tools/ui/package.json", "{}"),
    ("tools/ui/package-lock.json", "{}"),
    ("tools/ui/svelte.config.js", ""),
    ("tools/ui/src/app.html", ""),
    ("scripts/ui-assets.cmake", ""),
];

/// A machine with node, this npm, and a cmake that records source and options and ends the build.
fn rig(npm: &str) -> Rig {
    let cmake = "[ \"$1\" = --version ] && echo cmake version 4.0.0 && exit; \
                 top=../../..; cp -r src/tools/ui $top/seen; echo \"$@\" > $top/options; exit 1";
    let npm = format!("[ \"$1\" = --version ] && echo 10.8.2 && exit; {npm}");
    let mut rig = Rig::new(&[("npm", &npm), ("node", "echo v22.1.0"), ("cmake", cmake)]);
    for (name, text) in UI {
        let path = rig.folder.path().join("source").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    rig.request.page_timeout = Duration::from_secs(60);
    rig
}

/// Notes of the build before cmake, and its plans.
async fn told(rig: &mut Rig) -> (Vec<String>, Vec<BuildPlan>) {
    let (reporter, mut events) = EventReporter::channel();
    rig.builder.reporter = reporter;
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(error, BuilderError::Build { phase: "configuring", .. }), "{error}");
    let (mut notes, mut plans) = (Vec::new(), Vec::new());
    while let Ok(event) = events.try_recv() {
        match event {
            BuildEvent::Note(text) => notes.push(text),
            BuildEvent::Planned(plan) => plans.push(*plan),
            _ => {}
        }
    }
    rig.nothing_is_left();
    (notes, plans)
}

fn seen(rig: &Rig, name: &str) -> Option<String> {
    fs::read_to_string(rig.folder.path().join("seen").join(name)).ok()
}

fn options(rig: &Rig) -> String {
    fs::read_to_string(rig.folder.path().join("options")).unwrap()
}

#[tokio::test]
async fn npm_makes_the_page_before_cmake_is_called() {
    let mut rig = rig(
        "echo \"$@\" >> calls; [ \"$1\" = ci ] && exit; mkdir -p dist; echo page > $LLAMA_UI_OUT_DIR/index.html",
    );
    let (_, plans) = told(&mut rig).await;
    assert_eq!(plans.len(), 1);
    assert_eq!(seen(&rig, "dist/index.html").as_deref(), Some("page\n"));
    assert_eq!(seen(&rig, "calls").as_deref(), Some("ci\nrun build\n"));
    assert_eq!(plans[0].recipe.extras, ["npm 10.8.2, node v22.1.0"]);
    assert!(options(&rig).contains("-DLLAMA_BUILD_UI=ON"));
}

#[tokio::test]
async fn a_page_that_npm_cannot_make_leaves_the_build_that_a_machine_without_npm_would_make() {
    for (npm, why) in [
        (
            "echo npm error offline; echo more; exit 1",
            "`npm ci` ended with exit status: 1: npm error offline",
        ),
        ("[ \"$1\" = ci ] && exit; echo broke; exit 3", "`npm run build` ended with exit status: 3: broke"),
        ("exit 0", "npm ended well and left no dist/index.html"),
    ] {
        let mut rig = rig(npm);
        let (notes, plans) = told(&mut rig).await;
        let [with, without] = plans.as_slice() else { unreachable!("{plans:?}") };
        assert!(
            notes.iter().any(|note| note.contains("continues without it") && note.contains(why)),
            "{notes:?}"
        );
        assert!(without.extras.page.contains(why), "{}", without.extras.page);
        assert!(options(&rig).contains("-DLLAMA_BUILD_UI=OFF"), "cmake runs no npm");
        // The build without a page has the same id as on a machine without npm, so the next failure hits
        // the store.
        fs::remove_file(rig.folder.path().join("bin/npm")).unwrap();
        rig.builder.env.path = format!("{}:/nonexistent", rig.folder.path().join("bin").display()).into();
        let bare = rig.builder.plan(&rig.request).await.unwrap();
        assert!(with.id != without.id && bare.id == without.id);
    }
}

#[tokio::test]
async fn an_npm_that_never_ends_is_ended_and_the_build_goes_on() {
    let mut rig = rig("sleep 600 & echo $! > ../../../../../../pid; wait");
    rig.request.page_timeout = Duration::from_millis(300);
    let (notes, plans) = told(&mut rig).await;
    assert_eq!(plans.len(), 2);
    assert!(
        notes.iter().any(|note| note.contains("was not done within 300ms (build.page_timeout)")),
        "{notes:?}"
    );
    let pid = fs::read_to_string(rig.folder.path().join("pid")).unwrap();
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    assert!(stat.map_or(true, |stat| stat.contains(") Z ")), "npm's child still runs");
}

#[tokio::test]
async fn a_build_without_the_page_in_the_store_is_a_hit_once_the_page_failed_again() {
    let mut rig = rig("echo >> ../../../../../../tries; exit 1");
    let (_, plans) = told(&mut rig).await;
    rig.install(plans[1].clone());
    let built = rig.builder.build(&rig.request).await.unwrap();
    assert!(built.hit && built.id == plans[1].id);
    assert_eq!(fs::read_to_string(rig.folder.path().join("tries")).unwrap(), "\n\n", "tried again");
}

#[tokio::test]
async fn a_wish_for_the_page_is_no_way_to_an_npm_without_bounds() {
    let mut rig = rig("exit 1");
    rig.request.options = vec!["LLAMA_BUILD_UI=ON".to_owned()];
    let (_, plans) = told(&mut rig).await;
    assert_eq!(plans.len(), 2);
    assert!(!options(&rig).contains("-DLLAMA_BUILD_UI=ON"), "{}", options(&rig));
    rig.request.options = vec!["LLAMA_BUILD_UI=OFF".to_owned()];
    fs::remove_dir_all(rig.folder.path().join("seen")).unwrap();
    assert_eq!(told(&mut rig).await.1.len(), 1, "npm is not asked");
}

#[tokio::test]
async fn what_a_source_lacks_of_its_page_is_said_and_stood_in_for_where_it_is_compiled() {
    let mut rig = rig("exit 1");
    fs::remove_file(rig.folder.path().join("source/tools/ui/src/app.html")).unwrap();
    let (_, plans) = told(&mut rig).await;
    assert_eq!(plans[0].extras.page, "none: this source lacks tools/ui/src/app.html, of which it is made");
    assert_eq!(
        (seen(&rig, "ui.h"), plans.len()),
        (None, 1),
        "upstream's own parts make a server without a page"
    );
    fs::remove_dir_all(rig.folder.path().join("seen")).unwrap();
    fs::remove_file(rig.folder.path().join("source/tools/ui/embed.cpp")).unwrap();
    let (_, plans) = told(&mut rig).await;
    assert!(plans[0].extras.page.contains("lacks tools/ui/embed.cpp"), "{}", plans[0].extras.page);
    assert!(seen(&rig, "CMakeLists.txt").unwrap().contains("add_library(llama-ui INTERFACE)"));
    assert!(seen(&rig, "ui.h").unwrap().contains("llama_ui_get_assets"));
    assert!(plans[0].recipe.extras.iter().any(|extra| extra.starts_with("stand-in")));
}
