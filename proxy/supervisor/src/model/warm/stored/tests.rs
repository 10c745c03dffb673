//! Conversations on disk: their files, limits, damage, and restores that fail.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;

use super::save::{EndedConversations, StoreReport};
use super::*;
use crate::lease::turns::ConversationTurn;
use crate::model::warm::pack::{SavedSlot, SavedSlots};
use crate::process::slot_files::{SlotFiles, checkpoint_name};
use crate::process::touch::AnswerText;
use crate::spec::ServerCommand;

const LIMITS: StoreLimits =
    StoreLimits { bytes: 1 << 30, age: Duration::from_secs(1000), fresh_for: Duration::from_secs(900) };
const KIN: AnswerIdentity = AnswerIdentity { made_of: 7, but_for_binary: 8, answer_tokens: None };

struct StoreRig {
    parent: tempfile::TempDir,
    store: Arc<StoredConversations>,
    files: Arc<SlotFiles>,
}

fn turn(question: &str) -> ConversationTurn {
    let body = json!({ "messages": [{ "role": "user", "content": question }] });
    ConversationTurn {
        path: "/v1/chat/completions".to_owned(),
        body: Some(body.to_string().into()),
        said: AnswerText::Text(format!("answer to {question}")),
        prompt: 900,
        tokens: 1000,
        has_media: false,
        prefill: None,
    }
}

fn conversation(question: &str) -> Arc<KeptConversation> {
    Arc::new(KeptConversation::new(turn(question)))
}

fn model() -> ModelName {
    ModelName::new("org/a model")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

impl StoreRig {
    fn new() -> Self {
        let parent = tempfile::tempdir().unwrap();
        let store = Arc::new(StoredConversations::new(parent.path(), &model()));
        let command = ServerCommand::from_binary("/opt/llama-server".into());
        let socket = parent.path().join("m-7-g1.sock");
        let files = SlotFiles::from_command(&command, &socket, Some(store.directory()));
        files.announce(&mut command.clone()).unwrap();
        assert!(files.are_stored());
        Self { parent, store, files: Arc::new(files) }
    }

    /// As llama-server saves slots, with checkpoints.
    fn saved_slots(&self, conversations: &[&Arc<KeptConversation>]) -> SavedSlots {
        let slots = conversations.iter().enumerate().map(|(number, kept)| {
            let name = self.files.file_name(number);
            let path = self.store.directory().join(&name);
            fs::write(&path, format!("state {number}")).unwrap();
            fs::write(self.path(&checkpoint_name(&name)), "checkpoints").unwrap();
            SavedSlot { name, slot: 0, tokens: 999, conversation: Some(Arc::clone(kept)), is_stored: false }
        });
        SavedSlots {
            files: Arc::clone(&self.files),
            kin: KIN,
            slots: slots.collect(),
            no_file: None,
            bytes: 0,
            took: Duration::ZERO,
        }
    }

    fn save(&self, all: &[&Arc<KeptConversation>], with_slot: &[&Arc<KeptConversation>]) -> StoreReport {
        self.save_within(all, with_slot, LIMITS)
    }

    fn save_within(
        &self,
        all: &[&Arc<KeptConversation>],
        with_slot: &[&Arc<KeptConversation>],
        limits: StoreLimits,
    ) -> StoreReport {
        let conversations = all.iter().map(|kept| Arc::clone(kept)).collect();
        let ended = EndedConversations { slots: 4, replica: 0, kin: Some(KIN), conversations };
        let batch = self.store.save_prompts(&ended, limits).unwrap();
        self.store.attach_slots(&batch, Some(self.saved_slots(with_slot)), limits, soon())
    }

    fn query() -> LoadQuery {
        LoadQuery { replica: 0, replicas: 1, slots: 4, kin: Some(KIN), limits: LIMITS, deadline: soon() }
    }

    /// Loads, and is ready.
    fn load(&self) -> Vec<StoredConversation> {
        self.load_as(&Self::query())
    }

    fn load_as(&self, query: &LoadQuery) -> Vec<StoredConversation> {
        let loaded = self.store.load(query);
        let markers = files_in(self.store.directory()).into_iter().filter(|file| restoring::is_marker(file));
        markers.for_each(|file| fs::remove_file(file).unwrap());
        loaded
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut all = files_in(self.store.directory());
        all.retain(|file| file.extension().is_none_or(|end| end != "mark"));
        all
    }

    fn path(&self, file: &str) -> PathBuf {
        self.store.directory().join(file)
    }
}

fn questions(loaded: &[StoredConversation]) -> Vec<String> {
    let question = |stored: &StoredConversation| {
        let body: serde_json::Value =
            serde_json::from_slice(stored.conversation.turn.body.as_ref().unwrap()).unwrap();
        body["messages"][0]["content"].as_str().unwrap().to_owned()
    };
    loaded.iter().map(question).collect()
}

#[test]
fn saved_conversations_are_loaded_latest_first_with_their_slots_and_are_private() {
    let rig = StoreRig::new();
    let (late, early) = (conversation("late"), conversation("early"));
    let report = rig.save(&[&late, &early], &[&late]);
    assert_eq!((report.conversations, report.slots), (2, 1));
    let sizes = rig.files().iter().map(|file| fs::metadata(file).unwrap().len()).sum::<u64>();
    assert!(report.bytes >= sizes, "{report:?} {sizes}");
    assert_eq!(rig.files().len(), 4, "two records, a slot and its checkpoints");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(rig.store.directory()), 0o700);
    for file in rig.files().iter().filter(|file| file.extension().is_some_and(|end| end == "json")) {
        assert_eq!(mode(file), 0o600);
    }
    // Another program.
    let store = StoredConversations::new(rig.parent.path(), &model());
    let loaded = store.load(&StoreRig::query());
    assert_eq!(questions(&loaded), ["late", "early"]);
    let turn = &loaded[0].conversation.turn;
    assert_eq!((turn.prompt, turn.tokens, &turn.said), (900, 1000, &late.turn.said));
    assert_eq!((loaded[0].slot.as_ref().unwrap().1, &loaded[1].slot), (999, &None));
    let other = StoredConversations::new(rig.parent.path(), &ModelName::new("org/a-model"));
    assert_ne!(other.directory(), store.directory());
    assert!(other.load(&StoreRig::query()).is_empty());
}

#[test]
fn damaged_files_are_seen_and_removed_and_files_that_take_too_long_stay() {
    for damage in ["shorter", "changed", "without checkpoints", "other checkpoints", "gone"] {
        let rig = StoreRig::new();
        let kept = conversation("a");
        rig.save(&[&kept], &[&kept]);
        let late = LoadQuery { deadline: Instant::now(), ..StoreRig::query() };
        assert!(rig.load_as(&late)[0].slot.is_none(), "no time for its checksum");
        let file = rig.load().remove(0).slot.unwrap().0;
        let (path, checkpoints) = (rig.path(&file), rig.path(&checkpoint_name(&file)));
        match damage {
            "shorter" => fs::write(&path, "stat").unwrap(),
            "changed" => fs::write(&path, "State 0").unwrap(),
            "without checkpoints" => fs::remove_file(&checkpoints).unwrap(),
            "gone" => fs::remove_file(&path).unwrap(),
            _ => fs::write(&checkpoints, "Checkpoints").unwrap(),
        }
        let loaded = rig.load();
        assert!(questions(&loaded) == ["a"] && loaded[0].slot.is_none(), "{damage}: its prompt is known");
        assert!(rig.files().is_empty(), "{damage}");
    }
}

#[test]
fn records_that_are_no_records_are_removed_and_foreign_files_stay() {
    let rig = StoreRig::new();
    let kept = conversation("a");
    rig.save(&[&kept], &[&kept]);
    let whole = fs::read_to_string(rig.path(&record_file(&rig.store.names()[0]))).unwrap();
    for text in [
        "",
        "{}",
        &whole[..whole.len() / 2],
        &whole.replace("\"version\":1", "\"version\":2"),
        &whole.replace("/v1/chat", "http://v1/chat"),
    ] {
        let name = ConversationName::new(clock::unix_now_ms() + 5000, LIMITS.age, 0, 0);
        fs::write(rig.path(&record_file(&name)), text).unwrap();
    }
    let name = ConversationName::new(clock::unix_now_ms() + 5000, LIMITS.age, 0, 0);
    std::os::unix::fs::symlink("/etc/passwd", rig.path(&record_file(&name))).unwrap();
    fs::write(rig.path("notes.json"), "mine").unwrap();
    assert_eq!(questions(&rig.load()), ["a"]);
    assert_eq!(rig.store.names().len(), 1);
    assert!(rig.path("notes.json").exists());
}

#[test]
fn a_process_that_cannot_use_a_slot_leaves_it_to_the_next() {
    let rig = StoreRig::new();
    let kept = conversation("a");
    rig.save(&[&kept], &[&kept]);
    for kin in [Some(AnswerIdentity { made_of: 70, ..KIN }), None] {
        let other = LoadQuery { kin, ..StoreRig::query() };
        let loaded = rig.load_as(&other);
        assert!(questions(&loaded) == ["a"] && loaded[0].slot.is_none());
        let limits = StoreLimits { fresh_for: Duration::ZERO, ..LIMITS };
        assert!(rig.load_as(&LoadQuery { limits, ..other }).is_empty());
    }
    assert!(rig.load()[0].slot.is_some());
}

#[test]
fn a_save_replaces_earlier_versions_and_leaves_unchanged_files() {
    let rig = StoreRig::new();
    let turns = crate::lease::turns::ConversationStore::default();
    turns.set_enabled(true);
    let (a, b) = (conversation("a"), conversation("b"));
    rig.save(&[&a, &b], &[&a, &b]);
    let one = GenerationId(1);
    turns.add_stored(one, rig.load().into_iter().map(|stored| stored.conversation));
    turns.note_turn(one, turn("b"));
    let before = rig.store.names();
    let now = turns.conversations_of(one);
    assert_eq!(now.len(), 2);
    let report = rig.save(&[&now[0], &now[1]], &[&now[0]]);
    assert_eq!((report.conversations, report.slots), (2, 2));
    let after = rig.store.names();
    assert_eq!((after.len(), after.iter().filter(|name| before.contains(name)).count()), (2, 1));
    assert_eq!(questions(&rig.load()), ["b", "a"]);
    // A program that does not know the earlier version finds it when it loads.
    let b = conversation("b");
    rig.save(&[&b], &[&b]);
    assert_eq!((rig.store.names().len(), questions(&rig.load())), (3, vec!["b".to_owned(), "a".to_owned()]));
    assert_eq!(rig.store.names().len(), 2);
    // A slot that a process could not use may be of use to the next one, until there is a new one.
    let unused = rig.load().remove(1).conversation;
    unused.note_useless_slot();
    let report = rig.save(&[&unused], &[]);
    assert_eq!((report.conversations, report.slots, rig.store.names().len()), (1, 0, 3));
    rig.save(&[&unused], &[&unused]);
    assert_eq!(questions(&rig.load()), ["a", "b"]);
}

#[test]
fn number_bytes_and_age_are_bounded() {
    let rig = StoreRig::new();
    let all: Vec<_> = (0..6).map(|n| conversation(&format!("c{n}"))).collect();
    let refs: Vec<_> = all.iter().collect();
    assert_eq!(rig.save(&refs, &refs).conversations, 4);
    assert_eq!(questions(&rig.load()), ["c0", "c1", "c2", "c3"]);
    let sizes = rig.files().iter().map(|file| fs::metadata(file).unwrap().len()).sum::<u64>();
    rig.store.remove_excess(StoreLimits { bytes: sizes / 2 + 10, ..LIMITS });
    assert_eq!(questions(&rig.load()), ["c0", "c1"], "the latest stay");
    assert_eq!(rig.files().len(), 6);
    // A time in the future was written by a wrong clock.
    let ahead = ConversationName::new(clock::unix_now_ms() + 2 * MAX_CLOCK_LEAD_MS, LIMITS.age, 0, 0);
    fs::copy(rig.path(&record_file(&rig.store.names()[0])), rig.path(&record_file(&ahead))).unwrap();
    assert_eq!(questions(&rig.load()), ["c0", "c1"]);
    rig.store.remove_excess(LIMITS);
    assert!(!rig.path(&record_file(&ahead)).exists());
    // A shorter age is in effect at once.
    let young = LoadQuery { limits: StoreLimits { age: Duration::ZERO, ..LIMITS }, ..StoreRig::query() };
    assert!(rig.load_as(&young).is_empty());
    let name = ConversationName::new(clock::unix_now_ms(), LIMITS.age, 0, 0);
    fs::write(rig.path(&slot_file(&name)), "half").unwrap();
    rig.store.remove_excess(StoreLimits { age: Duration::ZERO, ..LIMITS });
    assert_eq!(rig.files(), [rig.path(&slot_file(&name))], "somebody may still write that");
    let long_ago = std::time::UNIX_EPOCH + Duration::from_millis(clock::unix_now_ms())
        - INCOMPLETE_FOR
        - Duration::from_secs(2);
    let file = fs::File::options().write(true).open(rig.path(&slot_file(&name))).unwrap();
    file.set_modified(long_ago).unwrap();
    rig.store.remove_excess(LIMITS);
    assert!(rig.files().is_empty());
}

#[test]
fn with_fewer_replicas_each_conversation_still_has_one() {
    let rig = StoreRig::new();
    for replica in 0..3 {
        let conversations = vec![conversation(&format!("r{replica}"))];
        let ended = EndedConversations { slots: 4, replica, kin: Some(KIN), conversations };
        let batch = rig.store.save_prompts(&ended, LIMITS).unwrap();
        rig.store.attach_slots(&batch, None, LIMITS, soon());
    }
    let of = |replica| questions(&rig.load_as(&LoadQuery { replica, replicas: 2, ..StoreRig::query() }));
    let mut of_first = of(0);
    of_first.sort();
    assert_eq!((of_first, of(1)), (vec!["r0".to_owned(), "r2".to_owned()], vec!["r1".to_owned()]));
}

#[test]
fn a_slot_that_is_gone_costs_only_itself_and_after_a_removal_nothing_is_saved() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    fs::write(&file, "").unwrap();
    let store = StoredConversations::new(&file, &model());
    let ended =
        EndedConversations { slots: 4, replica: 0, kin: None, conversations: vec![conversation("a")] };
    assert!(store.save_prompts(&ended, LIMITS).is_err());

    let rig = StoreRig::new();
    let (a, b) = (conversation("a"), conversation("b"));
    let ended = EndedConversations {
        slots: 4,
        replica: 0,
        kin: Some(KIN),
        conversations: vec![Arc::clone(&a), Arc::clone(&b)],
    };
    let batch = rig.store.save_prompts(&ended, LIMITS).unwrap();
    let slots = rig.saved_slots(&[&a, &b]);
    fs::remove_file(rig.path(&slots.slots[0].name)).unwrap();
    let report = rig.store.attach_slots(&batch, Some(slots), LIMITS, soon());
    assert_eq!((report.conversations, report.slots), (2, 1));
    let batch = rig.store.save_prompts(&ended, LIMITS).unwrap();
    *lock(&rig.store.is_closed) = true;
    remove_all(rig.store.directory());
    let slots = rig.saved_slots(&[&a, &b]);
    let report = rig.store.attach_slots(&batch, Some(slots), LIMITS, soon());
    assert_eq!(report.slots, 0);
    assert!(rig.files().is_empty(), "{:?}", rig.files());
    assert!(rig.store.save_prompts(&ended, LIMITS).is_err());
}

#[test]
fn what_was_being_restored_at_two_deaths_is_removed() {
    let rig = StoreRig::new();
    let (a, b) = (conversation("a"), conversation("b"));
    rig.save(&[&a, &b], &[&a]);
    assert_eq!(rig.store.load(&StoreRig::query()).len(), 2);
    assert_eq!(rig.store.load(&StoreRig::query()).len(), 2, "once may be chance");
    assert_eq!(questions(&rig.store.load(&StoreRig::query())), ["b"]);
    // A process that is ready ends the count.
    let rig = StoreRig::new();
    rig.save(&[&a], &[&a]);
    for _ in 0..5 {
        assert_eq!(rig.load().len(), 1);
    }
}
