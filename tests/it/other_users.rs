//! Another ordinary user can read, answer, delete and stop nothing of ours. Alice serves, Mallory attacks;
//! both are user ids without an account. Only root can run as two users, so without root these tests are
//! skipped.

use std::ffi::OsString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Gid, Signal, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde_json::json;
use warden_rig::home::Ran;
use warden_rig::process::Kid;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Home, Http, Outcome, Trouble, binaries, wait_until};

/// Number of starts that an attacker can race with; Mallory used to win on the fourth to the tenth.
const STARTS: usize = 14;

struct Users {
    alice: u32,
    mallory: u32,
    /// Folder with a copy of the program, because other users cannot reach the tests' own.
    _programs: tempfile::TempDir,
    warden: PathBuf,
    fake: PathBuf,
}

impl Users {
    /// Prints a line and returns `None` without root.
    #[expect(clippy::print_stderr, reason = "captured by the test harness")]
    fn new() -> Result<Option<Self>, Trouble> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !geteuid().is_root() || !Path::new("/usr/bin/setpriv").exists() {
            eprintln!(
                "skipped: needs root, who can run programs as two other users, and setpriv (util-linux)"
            );
            return Ok(None);
        }
        // Ids below 65,536, which a container has, and different ones for concurrent tests.
        let number = (std::process::id() * 16 + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let (alice, mallory) = (20_000 + number * 2, 20_001 + number * 2);
        let programs = tempfile::tempdir()?;
        fs::set_permissions(programs.path(), fs::Permissions::from_mode(0o755))?;
        let [warden, fake] = ["llama-warden", "fake-llama"].map(|name| programs.path().join(name));
        for (built, reachable) in [(binaries::llama_warden()?, &warden), (binaries::fake_llama()?, &fake)] {
            if fs::hard_link(&built, reachable).is_err() {
                fs::copy(&built, reachable)?;
            }
        }
        Ok(Some(Self { alice, mallory, _programs: programs, warden, fake }))
    }

    /// Configuration of a setup, with programs that Alice can run.
    fn config(&self, setup: &Setup) -> Result<String, Trouble> {
        let built = binaries::fake_llama()?.display().to_string();
        Ok(setup.config().replace(&built, &self.fake.display().to_string()))
    }

    fn give_to_alice(&self, home: &Home) -> Outcome {
        fn give(path: &Path, user: u32) -> std::io::Result<()> {
            chown(path, Some(user), Some(user))?;
            if fs::symlink_metadata(path)?.is_dir() {
                for entry in fs::read_dir(path)? {
                    give(&entry?.path(), user)?;
                }
            }
            Ok(())
        }
        Ok(give(home.path(), self.alice)?)
    }

    fn words(user: u32, program: &Path, args: &[&str]) -> Vec<OsString> {
        let as_user = [format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".to_owned()];
        let program = [program.as_os_str().to_owned()];
        as_user
            .into_iter()
            .map(OsString::from)
            .chain(program)
            .chain(args.iter().map(OsString::from))
            .collect()
    }

    async fn run(&self, user: u32, home: &Home, args: &[&str]) -> Result<Ran, Trouble> {
        home.run(Path::new("/usr/bin/setpriv"), Self::words(user, &self.warden, args), SOON).await
    }

    fn start(&self, home: &Home, args: &[&str], log: PathBuf) -> Result<Kid, Trouble> {
        let words = Self::words(self.alice, &self.warden, args);
        Kid::start(Path::new("/usr/bin/setpriv"), &words, &home.env, home.path(), log)
    }

    /// Folder of Alice's sockets without `XDG_RUNTIME_DIR`.
    fn base(user: u32) -> Base {
        let path = PathBuf::from(format!("/tmp/llama-warden-{user}"));
        let is_ours = !path.exists();
        Base(path, is_ours)
    }
}

/// A directory in the temporary one, removed with the test. An existing one stays, because root may run a
/// llama-warden on this machine.
struct Base(PathBuf, bool);

impl Drop for Base {
    fn drop(&mut self) {
        if self.1 {
            drop(fs::remove_dir_all(&self.0));
        }
    }
}

/// Attack that Mallory repeats on her own thread until it is stopped.
struct Attack<T: Send + 'static> {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<T, Trouble>>>,
}

impl<T: Send + 'static> Attack<T> {
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    fn begin(user: u32, work: impl FnOnce(&AtomicBool) -> Result<T, Trouble> + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
            // Changes only this thread, because the kernel keeps users per thread.
            set_thread_groups(&[]).and_then(|()| set_thread_res_gid(gid, gid, gid))?;
            set_thread_res_uid(uid, uid, uid)?;
            work(&seen)
        });
        Self { stop, thread: Some(thread) }
    }

    fn end(mut self) -> Result<T, Trouble> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("her thread")?;
        thread.join().map_err(|_| Trouble::new("what she does has panicked"))?
    }
}

impl<T: Send + 'static> Drop for Attack<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Makes and removes a public directory until another user has put files into it; returns their names.
fn snatch(path: &Path, user: u32, stop: &AtomicBool) -> Vec<OsString> {
    while !stop.load(Ordering::Relaxed) {
        if fs::create_dir(path).is_ok() {
            drop(fs::set_permissions(path, fs::Permissions::from_mode(0o777)));
            (0..20_000).for_each(|_| std::hint::spin_loop());
        }
        let is_hers = || fs::symlink_metadata(path).is_ok_and(|facts| facts.uid() == user);
        if fs::remove_dir(path).is_err() && is_hers() {
            let inside: Vec<OsString> =
                fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
            if !inside.is_empty() {
                return inside;
            }
        }
        (0..2_000).for_each(|_| std::hint::spin_loop());
    }
    Vec::new()
}

fn home_of_alice(users: &Users, top: &str) -> Result<Setup, Trouble> {
    let setup = Setup::new()?.top(top).fake("m", &json!({}), "preload = false\n")?;
    setup.home.file("warden.toml", users.config(&setup)?)?;
    users.give_to_alice(&setup.home)?;
    Ok(setup)
}

#[tokio::test]
async fn a_user_who_makes_our_directory_first_gets_no_socket_of_ours() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    let mut setup = home_of_alice(&users, "")?;
    setup.home.env.remove(std::ffi::OsStr::new("XDG_RUNTIME_DIR"));
    let base = Users::base(users.alice);
    let (mut served, mut refused) = (0, 0);
    for start in 1..=STARTS {
        drop(fs::remove_dir_all(&base.0));
        let (path, mallory) = (base.0.clone(), users.mallory);
        let attack = Attack::begin(mallory, move |stop| Ok(snatch(&path, mallory, stop)));
        let log = setup.home.path().join("warden.log");
        let mut kid = users.start(&setup.home, &["serve", "--config", "warden.toml"], log)?;
        wait_until("it serves or refuses", SOON, async || {
            kid.ended().is_some() || kid.output().contains("listening on http")
        })
        .await?;
        if kid.ended().is_some() {
            refused += 1;
            let said = kid.output();
            assert!(said.contains("who can exchange") || said.contains("makes and removes"), "{said}");
        } else {
            served += 1;
            kid.signal(Signal::TERM);
            kid.exit(SOON).await?;
        }
        let caught = attack.end()?;
        assert!(caught.is_empty(), "at start {start} she got {caught:?}");
    }
    assert_eq!(served + refused, STARTS);
    Ok(())
}

#[tokio::test]
async fn a_directory_of_our_name_keeps_nobody_from_starting_who_does_not_use_it() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    let setup = home_of_alice(&users, "")?;
    let base = Users::base(users.alice);
    fs::create_dir(&base.0)?;
    chown(&base.0, Some(users.mallory), None)?;
    let log = setup.home.path().join("warden.log");
    let mut kid = users.start(&setup.home, &["serve", "--config", "warden.toml"], log)?;
    kid.says("listening on http", SOON).await?;
    let told = users.run(users.alice, &setup.home, &["status", "--config", "warden.toml"]).await?;
    assert_eq!(told.code, 0, "{told:?}");
    assert_eq!(fs::read_dir(&base.0)?.count(), 0, "nothing is left there");
    kid.signal(Signal::TERM);
    kid.exit(SOON).await?;
    Ok(())
}

/// Answers every request on a socket, and records the requests.
fn impostor(socket: &Path, asked: &Arc<Mutex<Vec<String>>>, stop: &AtomicBool) -> Outcome {
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o777))?;
    listener.set_nonblocking(true)?;
    while !stop.load(Ordering::Relaxed) {
        let mut ready = [PollFd::new(&listener, PollFlags::IN)];
        let _late = poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
        let Ok((mut stream, _)) = listener.accept() else { continue };
        drop(stream.set_nonblocking(false));
        drop(stream.set_read_timeout(Some(Duration::from_secs(2))));
        let mut request = vec![0; 16 << 10];
        let length = stream.read(&mut request).unwrap_or(0);
        if length > 0
            && let Ok(mut asked) = asked.lock()
        {
            asked.push(String::from_utf8_lossy(&request[..length]).into_owned());
        }
        let body = r#"{"instance":{"pid":1},"fleet":{"models":[]},"entries":[],"choices":[],"data":[]}"#;
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        drop(stream.write_all(format!("{head}{body}").as_bytes()));
    }
    Ok(())
}

fn pointer(socket: &Path) -> String {
    json!({"pid": 4711, "version": "0.1.0", "address": "127.0.0.1:8080", "admin_socket": socket,
           "started_at": "2026-11-28T04:37:48Z", "ledger": "/x/ledger.jsonl"})
    .to_string()
}

const ASKING: [&[&str]; 6] =
    [&["status"], &["events"], &["restart", "m"], &["upgrade"], &["drain", "m"], &["report", "--list"]];

#[tokio::test]
async fn the_command_line_asks_no_instance_that_another_user_made_up() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    // Root looks in root's own place, which other tests of this machine may use, too.
    let root_base = Users::base(0);
    let for_root = !root_base.0.exists();
    let hers = tempfile::tempdir()?;
    fs::set_permissions(hers.path(), fs::Permissions::from_mode(0o777))?;
    let socket = hers.path().join("a.sock");
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (path, seen) = (socket.clone(), Arc::clone(&asked));
    let attack = Attack::begin(users.mallory, move |stop| impostor(&path, &seen, stop));
    wait_until("she listens", SOON, async || socket.exists()).await?;
    let victims =
        [(users.alice, Users::base(users.alice))].into_iter().chain(for_root.then_some((0, root_base)));
    for (victim, base) in victims {
        let mut home = Home::new()?;
        if victim != 0 {
            users.give_to_alice(&home)?;
        }
        home.env.remove(std::ffi::OsStr::new("XDG_RUNTIME_DIR"));
        let folder = base.0.join("llama-warden-instances");
        let (text, mallory) = (pointer(&socket), users.mallory);
        Attack::begin(mallory, move |_| {
            fs::create_dir_all(&folder)?;
            Ok(fs::write(folder.join("daemon.json"), text)?)
        })
        .end()?;
        for args in ASKING {
            let ran = users.run(victim, &home, args).await?;
            let is_report = args[0] == "report";
            assert!(is_report || ran.code == 1, "{victim}: {args:?}: {ran:?}");
            assert!(is_report || ran.all().contains("no llama-warden is running here"), "{args:?}: {ran:?}");
        }
        assert_eq!(*asked.lock().unwrap(), Vec::<String>::new(), "for {victim}");
    }
    attack.end()?;
    Ok(())
}

#[tokio::test]
async fn pointers_that_never_end_or_never_answer_hold_nobody_up() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    let setup = home_of_alice(&users, "")?;
    let log = setup.home.path().join("warden.log");
    let mut kid = users.start(&setup.home, &["serve", "--config", "warden.toml"], log)?;
    kid.says("listening on http", SOON).await?;
    let folder = setup.home.path().join("state/llama-warden/instances");
    wait_until("its pointer is there", SOON, async || folder.exists()).await?;
    // Entries that look like Alice's: a pipe, a device, a file of six GiB, and a socket with a full queue.
    let full = setup.home.path().join("full.sock");
    let name = full.clone();
    let listens = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::bind(&listens, &rustix::net::SocketAddrUnix::new(&name)?)?;
    rustix::net::listen(&listens, 0)?;
    let _waits = std::os::unix::net::UnixStream::connect(&full)?;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        folder.join("pipe.json"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )?;
    symlink("/dev/zero", folder.join("zero.json"))?;
    fs::File::create(folder.join("huge.json"))?.set_len(6 << 30)?;
    users.give_to_alice(&setup.home)?;
    let told = users.run(users.alice, &setup.home, &["status"]).await?;
    assert!(told.code == 0 && told.stdout.contains('m'), "{told:?}");
    fs::write(folder.join("full.json"), pointer(&full))?;
    users.give_to_alice(&setup.home)?;
    let told = users.run(users.alice, &setup.home, &["status"]).await?;
    assert!(told.code == 2 && told.all().contains("several llama-wardens are running"), "{told:?}");
    let socket = full.to_string_lossy().into_owned();
    let told = users.run(users.alice, &setup.home, &["status", "--admin-socket", &socket]).await?;
    assert!(told.code == 1 && told.all().contains("no connection was accepted"), "{told:?}");
    kid.signal(Signal::TERM);
    kid.exit(SOON).await?;
    Ok(())
}

#[tokio::test]
async fn a_folder_that_is_exchanged_while_root_looks_costs_root_no_file() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    let base = Users::base(0);
    if base.0.exists() {
        return Ok(());
    }
    let home = Home::new()?;
    let mut env = home.env.clone();
    env.remove(std::ffi::OsStr::new("XDG_RUNTIME_DIR"));
    let victim = home.path().join("precious");
    fs::create_dir(&victim)?;
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o755))?;
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o755))?;
    // A pointer to a missing socket, which root would remove from a folder of root's.
    let text = pointer(&home.path().join("gone.sock"));
    fs::write(victim.join("daemon.json"), &text)?;
    let (path, to, mallory) = (base.0.clone(), victim.clone(), users.mallory);
    let attack = Attack::begin(mallory, move |stop| {
        let (folder, link) = (path.join("llama-warden-instances"), path.join("l"));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("daemon.json"), text)?;
        symlink(to, &link)?;
        while !stop.load(Ordering::Relaxed) {
            let (here, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
            rustix::fs::renameat_with(here, &folder, here, &link, flags)?;
        }
        Ok(())
    });
    let mut home = home;
    home.env = env;
    for look in 0..20 {
        let ran = users.run(0, &home, &["status"]).await?;
        assert!(ran.all().contains("no llama-warden is running here"), "{ran:?}");
        assert!(victim.join("daemon.json").exists(), "gone after look {look}");
    }
    attack.end()?;
    Ok(())
}

#[tokio::test]
async fn who_binds_our_admin_socket_while_we_are_away_is_told_nothing() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    let public = tempfile::tempdir()?;
    fs::set_permissions(public.path(), fs::Permissions::from_mode(0o1777))?;
    let socket = public.path().join("warden.sock");
    let home = Home::new()?;
    home.file("warden.toml", format!("admin.socket = '{}'\n", socket.display()))?;
    // A pointer that a killed instance left has the same content.
    home.file("state/llama-warden/instances/4711.json", pointer(&socket))?;
    users.give_to_alice(&home)?;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (path, seen) = (socket.clone(), Arc::clone(&asked));
    let attack = Attack::begin(users.mallory, move |stop| impostor(&path, &seen, stop));
    wait_until("she listens", SOON, async || socket.exists()).await?;
    for args in [&["restart", "m", "--config", "warden.toml"][..], &["upgrade", "--config", "warden.toml"]] {
        let ran = users.run(users.alice, &home, args).await?;
        let word = format!("answered by user {}", users.mallory);
        assert!(ran.code == 1 && ran.all().contains(&word), "{ran:?}");
    }
    let ran = users.run(users.alice, &home, &["status"]).await?;
    assert!(ran.code == 1 && ran.all().contains("no llama-warden is running here"), "{ran:?}");
    // Root refuses as well, although its configuration names the socket.
    let ran = users.run(0, &home, &["restart", "m", "--config", "warden.toml"]).await?;
    assert!(ran.code == 1 && ran.all().contains("answered by user"), "{ran:?}");
    assert_eq!(*asked.lock().unwrap(), Vec::<String>::new());
    attack.end()?;
    Ok(())
}

#[tokio::test]
async fn root_finds_the_service_that_it_gave_a_folder() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    // systemd makes such folders for a service: root's above, the service's below.
    let run = tempfile::tempdir()?;
    fs::set_permissions(run.path(), fs::Permissions::from_mode(0o755))?;
    let state = run.path().join("state");
    fs::create_dir(&state)?;
    chown(&state, Some(users.alice), Some(users.alice))?;
    let setup = home_of_alice(&users, &format!("paths.state_dir = '{}'", state.display()))?;
    // Without a socket in the configuration, it must be found.
    let text = users.config(&setup)?;
    let text: Vec<&str> = text.lines().filter(|line| !line.starts_with("admin.socket")).collect();
    setup.home.file("warden.toml", text.join("\n"))?;
    users.give_to_alice(&setup.home)?;
    let log = setup.home.path().join("warden.log");
    let mut kid = users.start(&setup.home, &["serve", "--config", "warden.toml"], log)?;
    kid.says("listening on http", SOON).await?;
    let ran = users.run(0, &setup.home, &["status", "--config", "warden.toml"]).await?;
    assert!(ran.code == 0 && ran.stdout.contains('m'), "{ran:?}");
    let ran = users.run(0, &setup.home, &["drain", "--all", "--config", "warden.toml"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    kid.signal(Signal::KILL);
    kid.exit(SOON).await?;
    // The service must remove its own leftovers, so root leaves them.
    let ran = users.run(0, &setup.home, &["status", "--config", "warden.toml"]).await?;
    assert!(ran.all().contains("no llama-warden is running here"), "{ran:?}");
    assert_eq!(fs::read_dir(state.join("instances"))?.count(), 1);
    users.run(users.alice, &setup.home, &["status", "--config", "warden.toml"]).await?;
    assert_eq!(fs::read_dir(state.join("instances"))?.count(), 0);
    Ok(())
}

#[tokio::test]
async fn prompts_go_to_no_socket_of_another_user_who_took_the_place_of_our_directory() -> Outcome {
    let Some(users) = Users::new()? else { return Ok(()) };
    let mut setup = Setup::new()?.fake("m", &json!({}), "")?;
    setup.home.env.remove(std::ffi::OsStr::new("XDG_RUNTIME_DIR"));
    setup.home.file("warden.toml", users.config(&setup)?)?;
    setup.home.file("ledger.jsonl", "")?;
    users.give_to_alice(&setup.home)?;
    let base = Users::base(users.alice);
    let log = setup.home.path().join("warden.log");
    let mut kid = users.start(&setup.home, &["serve", "--config", "warden.toml"], log)?;
    let said = kid.says("listening on http", SOON).await?;
    let address = said.split("listening on http://").nth(1).and_then(|rest| rest.split_whitespace().next());
    let http = Http::Tcp(address.unwrap_or_default().trim_end_matches('/').parse()?);
    let answer = http.post(CHAT, &chat("before", "m", "hi", 3, false)).await?.answer()?;
    assert!(answer.is_whole(), "{answer:?}");
    // A cleaner empties the temporary directory, and Mallory makes the same names, open to all, before the
    // next start.
    let inside = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let folder = inside(&base.0).find(|path| path.join("lock").exists()).unwrap_or_default();
    let socket =
        inside(&folder).find(|path| path.to_string_lossy().ends_with("-g1.sock")).unwrap_or_default();
    assert!(socket.exists(), "{}", socket.display());
    fs::remove_dir_all(&base.0)?;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (path, seen, next) = (socket.clone(), Arc::clone(&asked), folder.clone());
    let attack = Attack::begin(users.mallory, move |stop| {
        fs::create_dir_all(&next)?;
        for path in next.ancestors().take(2) {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777))?;
        }
        impostor(&path, &seen, stop)
    });
    wait_until("she listens", SOON, async || socket.exists()).await?;
    for _ in 0..3 {
        // The request may wait for a process that cannot start, which is as good as no answer.
        let request = chat("after", "m", "a secret prompt", 3, false);
        let asking = tokio::time::timeout(Duration::from_secs(3), http.post(CHAT, &request));
        let Ok(answer) = asking.await else { continue };
        assert!(
            !answer.is_ok_and(|answer| answer.status.is_success() && answer.text().contains("choices\":[]"))
        );
    }
    let seen = asked.lock().unwrap().clone();
    assert_eq!(seen, Vec::<String>::new());
    assert!(
        inside(&folder)
            .all(|path| fs::symlink_metadata(path).is_ok_and(|facts| facts.uid() == users.mallory))
    );
    attack.end()?;
    Ok(())
}

#[tokio::test]
async fn a_server_inherits_no_secret_and_no_configuration_of_ours() -> Outcome {
    let mut setup = Setup::new()?.fake("m", &json!({}), "")?;
    let ours = [
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret"),
        ("CREDENTIALS_DIRECTORY", "/nowhere"),
        ("LLAMA_WARDEN_MODELS__M__ENV__OF_THE_MODEL", "given"),
        ("LLAMA_WARDEN_SERVER__SHUTDOWN_DEADLINE", "29s"),
        ("LLAMA_WARDEN_ADMIN_SOCKET", "/nowhere/admin.sock"),
    ];
    for (name, value) in ours {
        setup.home.env.insert(name.into(), value.into());
    }
    setup.home.env.insert("LLAMA_WARDEN_GRAPH_CACHE_CAP".into(), "8".into());
    let warden = setup.start().await?;
    let server = warden.until_ready(1).await?[0];
    for (name, _) in ours {
        assert_eq!(server.variable(name), None, "{name}");
    }
    assert_eq!(server.variable("OF_THE_MODEL"), Some("given".into()));
    assert_eq!(
        server.variable("LLAMA_WARDEN_GRAPH_CACHE_CAP"),
        Some("8".into()),
        "what patches read is no secret"
    );
    assert!(server.variable("PATH").is_some());
    drop(warden);
    let named = Setup::new()?.top("defaults.env.OTEL_EXPORTER_OTLP_ENDPOINT = 'http://127.0.0.1:9'");
    let warden = named.fake("m", &json!({}), "")?.start().await?;
    let server = warden.until_ready(1).await?[0];
    assert_eq!(server.variable("OTEL_EXPORTER_OTLP_ENDPOINT"), Some("http://127.0.0.1:9".into()));
    Ok(())
}
