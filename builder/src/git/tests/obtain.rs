//! Fetching commits, and working offline.

use std::fs;
use std::path::Path;
use std::time::Duration;

use git2::Oid;
use tempfile::TempDir;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::server::Server;
use super::{Item, Made};
use crate::error::{BuilderError, ErrorClass};
use crate::event::{BuildEvent, EventReporter};
use crate::git::fetch::{FetchLimits, FetchRequest, fetch};
use crate::git::{CommitRequest, GitError, GitLocation, ObtainedCommit, cache, obtain};
use crate::lock::FileLock;

/// A repository behind a server, and an empty cache.
struct Scene {
    made: Made,
    line: Vec<Oid>,
    server: Server,
    cache: TempDir,
}

fn scene() -> Scene {
    let made = Made::new();
    let line = made.line(4);
    made.tag("b2", line[1]);
    made.annotated("b3", line[2]);
    // GitHub has this setting.
    made.repo.config().unwrap().set_bool("uploadpack.allowAnySHA1InWant", true).unwrap();
    let server = Server::start(made.path());
    Scene { made, line, server, cache: tempfile::tempdir().unwrap() }
}

fn request(url: &str, reference: &str) -> CommitRequest {
    let reference = Some(reference.to_owned()).filter(|name| !name.is_empty());
    CommitRequest { location: GitLocation::Url(url.to_owned()), reference, offline: false, history: false }
}

async fn ask(cache: &Path, request: &CommitRequest) -> crate::Result<(ObtainedCommit, Vec<String>)> {
    let (reporter, mut events) = EventReporter::channel();
    let obtained = obtain(request, cache, &reporter, &CancellationToken::new()).await?;
    let mut notes = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let BuildEvent::Note(note) = event {
            notes.push(note);
        }
    }
    Ok((obtained, notes))
}

impl Scene {
    async fn ask(&self, reference: &str) -> crate::Result<(ObtainedCommit, Vec<String>)> {
        ask(self.cache.path(), &request(&self.server.url(), reference)).await
    }

    async fn commit(&self, reference: &str) -> String {
        self.ask(reference).await.unwrap().0.commit
    }
}

#[tokio::test]
async fn a_server_that_sends_more_than_any_source_has_is_not_listened_to() {
    let scene = scene();
    let (url, cancel) = (scene.server.url(), CancellationToken::new());
    let kept = scene.commit("b2").await;
    let place = cache::cache_slot(scene.cache.path(), &url, false);
    let lock = FileLock::take(&place.lock_path(), &cancel, || ()).await.unwrap();
    let most = FetchLimits { commit: 64, history: 64 };
    let wanted = FetchRequest { url: url.clone(), place, reference: Some("main".into()), limits: most };
    let error = fetch(wanted, lock, &EventReporter::silent(), &cancel).await.unwrap_err();
    assert!(matches!(error, BuilderError::Git(GitError::TooLarge { .. })), "{error}");
    let offline = CommitRequest { offline: true, ..request(&url, "main") };
    assert!(ask(scene.cache.path(), &offline).await.is_err(), "nothing of it was taken");
    let (obtained, notes) = scene.ask("b2").await.unwrap();
    assert_eq!(obtained.commit, kept, "what was there is there");
    // The thread of the fetch that was cut off may still hold the lock.
    assert!(notes.iter().all(|note| note.ends_with("waiting for it")), "{notes:?}");
}

#[tokio::test]
async fn whatever_a_server_has_a_name_for_is_fetched_alone() {
    let scene = scene();
    let id = |index: usize| scene.line[index].to_string();
    for (reference, index) in [("main", 3), ("b2", 1), ("b3", 2), ("", 3), (&id(3)[..10], 3), (&id(0), 0)] {
        assert_eq!(scene.commit(reference).await, id(index), "{reference}");
    }
    let (obtained, _) = scene.ask("b3").await.unwrap();
    assert!(!obtained.repository.is_complete(), "only single commits were asked for");
    // The number comes from the tag, because a shallow history cannot be counted.
    assert_eq!(obtained.repository.revision(&id(2)).unwrap().build_number, Some(3));
    assert_eq!(obtained.repository.shown(), scene.server.url());
}

#[tokio::test]
async fn a_whole_commit_that_is_here_is_asked_for_nowhere() {
    let scene = scene();
    let commit = scene.commit("b2").await;
    let asked = scene.server.times_asked();
    assert_eq!(scene.commit(&commit).await, commit);
    assert_eq!(scene.server.times_asked(), asked);
    // A tag may have moved.
    scene.made.tag("b2", scene.line[0]);
    assert_eq!(scene.commit("b2").await, scene.line[0].to_string());
}

#[tokio::test]
async fn offline_only_the_cache_answers() {
    let scene = scene();
    let mut wanted = request(&scene.server.url(), "b2");
    wanted.offline = true;
    let error = ask(scene.cache.path(), &wanted).await.unwrap_err();
    assert!(matches!(&error, BuilderError::Git(GitError::Offline { .. })), "{error}");
    assert_eq!(error.kind(), ErrorClass::Input);
    assert_eq!(scene.server.times_asked(), 0);
    scene.commit("b2").await;
    let asked = scene.server.times_asked();
    assert_eq!(ask(scene.cache.path(), &wanted).await.unwrap().0.commit, scene.line[1].to_string());
    assert_eq!(scene.server.times_asked(), asked);
}

#[tokio::test]
async fn without_a_network_a_branch_is_what_it_was_and_that_is_said() {
    let scene = scene();
    scene.commit("main").await;
    scene.server.limit.store(0, std::sync::atomic::Ordering::SeqCst);
    let (obtained, notes) = scene.ask("main").await.unwrap();
    assert_eq!(obtained.commit, scene.line[3].to_string());
    assert!(notes.iter().any(|note| note.contains("what the cache last saw as main")), "{notes:?}");
    assert!(scene.ask("b2").await.is_err(), "that was never fetched");
}

#[tokio::test]
async fn an_unreachable_server_is_named_with_a_way_out() {
    let cache = tempfile::tempdir().unwrap();
    for url in ["https://127.0.0.1:1/a", "https://me:secret@host.invalid/a"] {
        let error = ask(cache.path(), &request(url, "b2")).await.unwrap_err();
        let text = error.to_string();
        let host = GitLocation::Url(url.into()).host().to_owned();
        assert!(text.starts_with(&format!("{host} could not be asked for `b2`")), "{text}");
        assert!(!text.contains("secret"), "{text}");
        let hint = error.hint().unwrap();
        assert!(hint.contains("--offline") && hint.contains("--source"), "{hint}");
    }
}

#[tokio::test]
async fn a_password_that_is_not_taken_is_neither_asked_for_nor_shown() {
    let (server, cache) = (Server::forbidding(), tempfile::tempdir().unwrap());
    for user in ["", "me:secret@"] {
        let url = format!("http://{user}127.0.0.1:{}/a", server.port());
        let error =
            timeout(Duration::from_secs(60), ask(cache.path(), &request(&url, "main"))).await.unwrap();
        let error = error.unwrap_err();
        assert!(matches!(&error, BuilderError::Git(GitError::Refused { .. })), "{error}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    }
    assert!(server.times_asked() > 0, "the password of the URL was offered");
}

#[tokio::test]
async fn an_unknown_name_is_no_matter_of_the_network() {
    let scene = scene();
    let error = scene.ask("b22").await.unwrap_err();
    assert!(error.to_string().contains("has no tag, branch or commit `b22`; similar are: b2"), "{error}");
    let error = scene.ask("abcdef0").await.unwrap_err();
    assert!(error.hint().unwrap().contains("40 digits"));
    for old in [false, true] {
        scene.server.old.store(old, std::sync::atomic::Ordering::SeqCst);
        let error = scene.ask(&"ab".repeat(20)).await.unwrap_err();
        assert!(error.to_string().contains("has no tag, branch or commit `abab"), "{old}: {error}");
    }
}

#[tokio::test]
async fn a_server_that_hands_out_no_single_commits_is_fetched_whole() {
    let scene = scene();
    scene.made.repo.config().unwrap().set_bool("uploadpack.allowAnySHA1InWant", false).unwrap();
    scene.server.old.store(true, std::sync::atomic::Ordering::SeqCst);
    // The cached history ends at this commit.
    assert_eq!(scene.commit("main").await, scene.line[3].to_string());
    let (obtained, notes) = scene.ask(&scene.line[0].to_string()).await.unwrap();
    assert_eq!(obtained.commit, scene.line[0].to_string());
    assert!(notes.iter().any(|note| note.contains("fetching all of them")), "{notes:?}");
}

#[tokio::test]
async fn history_is_fetched_whole_and_used_from_then_on() {
    let scene = scene();
    let mut wanted = request(&scene.server.url(), "main");
    wanted.history = true;
    let (obtained, _) = ask(scene.cache.path(), &wanted).await.unwrap();
    assert!(obtained.repository.is_complete());
    assert_eq!(obtained.repository.range("b2", "main", 1).unwrap().len(), 2);
    // Tags are fetched, too: also those on older commits, and new ones each time.
    scene.made.tag("b2", scene.line[1]);
    scene.made.annotated("b3", scene.line[2]);
    wanted.reference = None;
    let (obtained, _) = ask(scene.cache.path(), &wanted).await.unwrap();
    let newest = obtained.repository.newest_tag("b*").unwrap();
    assert_eq!(newest, Some(("b3".to_owned(), scene.line[2].to_string())));
    let next = scene.made.llama(&[], &[scene.line[3]]);
    scene.made.branch("main", next);
    scene.made.branch("main2", next);
    let (obtained, _) = scene.ask("main").await.unwrap();
    assert_eq!(obtained.repository.revision(&obtained.commit).unwrap().build_number, Some(5));
    // A deleted branch does not block a new one whose name begins with its own.
    scene.made.repo.find_reference("refs/heads/main2").unwrap().delete().unwrap();
    scene.made.branch("main2/x", next);
    assert_eq!(scene.commit("main2/x").await, next.to_string());
}

#[tokio::test]
async fn a_fetch_that_breaks_off_harms_nothing_and_the_next_one_goes_on() {
    let scene = scene();
    // Incompressible content.
    let noise = (0..40_000_u64).fold(String::new(), |noise, number| {
        noise + &format!("{:x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    });
    let large = scene.made.llama(&[("src/large.cpp", Item::File(&noise))], &[scene.line[3]]);
    scene.made.branch("large", large);
    scene.commit("main").await;
    scene.server.limit.store(100_000, std::sync::atomic::Ordering::SeqCst);
    let error = scene.ask("large").await.unwrap_err();
    assert!(matches!(&error, BuilderError::Git(_)), "{error}");
    // The cached commits are intact, and no part of the new one is there.
    let mut offline = request(&scene.server.url(), "main");
    offline.offline = true;
    let (obtained, _) = ask(scene.cache.path(), &offline).await.unwrap();
    assert!(obtained.repository.tree(&obtained.commit).is_ok());
    assert!(obtained.repository.tree(&large.to_string()).is_err());
    scene.server.limit.store(u64::MAX, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(scene.commit("large").await, large.to_string());
    let packs = obtained.repository.path().join("objects/pack");
    let left = fs::read_dir(packs)
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("tmp_"));
    assert_eq!(left.count(), 0);
}

#[tokio::test]
async fn cancelling_ends_the_wait_for_a_silent_server_at_once() {
    let (server, cache) = (Server::silent(), tempfile::tempdir().unwrap());
    let cancel = CancellationToken::new();
    let (wanted, reporter) = (request(&server.url(), "main"), EventReporter::silent());
    let asking = obtain(&wanted, cache.path(), &reporter, &cancel);
    let stop = async {
        while server.times_asked() == 0 {
            tokio::task::yield_now().await;
        }
        cancel.cancel();
    };
    let (outcome, ()) = timeout(Duration::from_secs(20), async { tokio::join!(asking, stop) }).await.unwrap();
    assert!(matches!(outcome, Err(BuilderError::Cancelled)), "{outcome:?}");
}

#[tokio::test]
async fn what_is_damaged_in_the_cache_is_fetched_anew() {
    let scene = scene();
    for damage in ["objects/pack", "refs"] {
        let before = scene.commit("b2").await;
        let folder = fs::read_dir(scene.cache.path().join("git")).unwrap().map(|entry| entry.unwrap().path());
        let folder = folder.into_iter().find(|path| path.join("objects").exists()).unwrap();
        match damage {
            "refs" => fs::remove_dir_all(folder.join(damage)).unwrap(),
            _ => {
                for entry in fs::read_dir(folder.join(damage)).unwrap() {
                    let path = entry.unwrap().path();
                    let half = fs::read(&path).unwrap();
                    fs::remove_file(&path).unwrap();
                    fs::write(&path, &half[..half.len() / 2]).unwrap();
                }
            }
        }
        let (obtained, notes) = scene.ask("b2").await.unwrap();
        assert_eq!(obtained.commit, before, "{damage}");
        assert!(obtained.repository.tree(&before).is_ok(), "{damage}");
        assert!(notes.iter().any(|note| note.contains("damaged")), "{damage}: {notes:?}");
    }
}
