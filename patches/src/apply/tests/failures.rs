//! What is left when one operation of the disk fails, or the power goes.

use super::*;

/// A disk that fails at one operation, or at that and all later ones, as if the power had gone.
struct Failing {
    at: usize,
    forever: bool,
    count: Arc<AtomicUsize>,
}

impl Failing {
    fn turn(&self) -> io::Result<()> {
        let turn = self.count.fetch_add(1, Ordering::Relaxed);
        if turn == self.at || (self.forever && turn > self.at) {
            Err(io::Error::other("injected"))
        } else {
            Ok(())
        }
    }
}

impl Disk for Failing {
    fn write_new(&self, path: &Path, bytes: &[u8], mode: Option<u32>) -> io::Result<()> {
        if let Err(error) = self.turn() {
            // The worst moment: half of it is there.
            if self.forever && self.count.load(Ordering::Relaxed) == self.at + 1 {
                fs::write(path, &bytes[..bytes.len() / 2])?;
            }
            return Err(error);
        }
        RealDisk.write_new(path, bytes, mode)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.turn().and_then(|()| RealDisk.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.turn().and_then(|()| RealDisk.remove(path))
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.turn().and_then(|()| RealDisk.create_folder(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.turn().and_then(|()| RealDisk.remove_folder(path))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.turn().and_then(|()| RealDisk.sync_folder(path))
    }
}

/// Runs `work` with a disk that fails at its n-th operation, for every n until it does not fail any more.
fn with_every_failure(
    forever: bool,
    start: impl Fn() -> TempDir,
    mut work: impl FnMut(&TempDir, Target) -> bool,
) {
    for at in 0.. {
        let folder = start();
        let count = Arc::new(AtomicUsize::new(0));
        let disk = Box::new(Failing { at, forever, count: Arc::clone(&count) });
        let target = Target::with_disk(folder.path(), Revision::default(), disk).unwrap();
        let failed = work(&folder, target);
        let reached = count.load(Ordering::Relaxed) > at;
        if !reached {
            assert!(!failed, "nothing failed");
            assert!(at > 5, "there is too little to fail");
            return;
        }
    }
}

fn patched() -> TempDir {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    folder
}

fn same(left: &Path, right: &Path) -> bool {
    let relative = |root: &Path| {
        let all = snapshot(root).into_iter();
        all.map(|(path, content)| (path.strip_prefix(root).unwrap().to_owned(), content))
            .collect::<BTreeMap<_, _>>()
    };
    relative(left) == relative(right)
}

#[test]
fn one_failing_operation_leaves_the_tree_as_it_was() {
    let plain = folder();
    with_every_failure(false, folder, |folder, mut target| {
        let failed = target.apply(&series()).is_err();
        drop(target);
        if failed {
            assert!(same(folder.path(), plain.path()), "{:?}", snapshot(folder.path()).keys());
        }
        failed
    });
}

#[test]
fn after_a_crash_while_applying_the_next_apply_finishes_and_the_next_reverse_undoes() {
    let (plain, done) = (folder(), patched());
    with_every_failure(true, folder, |folder, mut target| {
        let failed = target.apply(&series()).is_err();
        drop(target);
        open(folder).apply(&series()).unwrap();
        assert!(same(folder.path(), done.path()), "{:?}", snapshot(folder.path()).keys());
        failed
    });
    with_every_failure(true, folder, |folder, mut target| {
        let failed = target.apply(&series()).is_err();
        drop(target);
        open(folder).reverse().unwrap();
        assert!(!folder.path().join(JOURNAL).exists(), "the journal stayed");
        // Before the journal was there, nothing was touched but its own unfinished file.
        drop(fs::remove_file(change::beside(&folder.path().join(JOURNAL))));
        assert!(same(folder.path(), plain.path()), "{:?}", snapshot(folder.path()).keys());
        failed
    });
}

#[test]
fn after_a_crash_while_reversing_both_ways_are_open() {
    let (plain, done) = (folder(), patched());
    for again in [true, false] {
        with_every_failure(true, patched, |folder, mut target| {
            let failed = target.reverse().is_err();
            drop(target);
            if again {
                open(folder).reverse().unwrap();
                assert!(same(folder.path(), plain.path()), "{:?}", snapshot(folder.path()).keys());
            } else {
                open(folder).apply(&series()).unwrap();
                assert!(same(folder.path(), done.path()), "{:?}", snapshot(folder.path()).keys());
            }
            failed
        });
    }
}

#[test]
fn one_failing_operation_while_reversing_loses_nothing() {
    let plain = folder();
    with_every_failure(false, patched, |folder, mut target| {
        let failed = target.reverse().is_err();
        drop(target);
        open(folder).reverse().unwrap();
        assert!(same(folder.path(), plain.path()), "{:?}", snapshot(folder.path()).keys());
        failed
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn apply_and_reverse_are_the_identity_over_any_files(
        lines in vec((vec(any::<u8>().prop_filter("line ends", |byte| *byte != b'\n'), 0..12), any::<bool>()), 0..20),
        last in vec(any::<u8>().prop_filter("line ends", |byte| *byte != b'\n'), 0..5),
        places in vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let mut content: Vec<u8> = lines
            .iter()
            .flat_map(|(text, crlf)| [&text[..], if *crlf { b"\r\n" } else { b"\n" }].concat())
            .collect();
        content.extend_from_slice(&last);
        let folder = folder();
        fs::write(folder.path().join("src/one.cpp"), &content).unwrap();
        let before = snapshot(folder.path());
        let mut edits = edit("src/one.cpp", &content, places[0].index(lines.len() + 1), "anchor();");
        for place in &places[1..] {
            edits.after = edit("src/one.cpp", &edits.after, place.index(lines.len() + 1), "more();").after;
        }
        let row = series_of(vec![edits.clone()]);
        prop_assert_eq!(open(&folder).apply(&row).unwrap(), Applied::Written);
        prop_assert_eq!(fs::read(folder.path().join("src/one.cpp")).unwrap(), edits.after);
        prop_assert_eq!(open(&folder).apply(&row).unwrap(), Applied::Already);
        open(&folder).reverse().unwrap();
        prop_assert_eq!(snapshot(folder.path()), before);
    }
}
