//! Starts the mock upstream and the proxies, each as its users would, with an access log to a file and
//! connections kept on both sides.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;
use warden_rig::poll::{Stream, now};
use warden_rig::warden::Setup;
use warden_rig::{Context as _, Home, Trouble, binaries};

use crate::load::{MODEL, Target};
use crate::machine::{LOAD, PROXY, family, has, pause, pin};
use crate::options::{Options, Variant};

/// More than any part opens at the same time.
const SLOTS: usize = 1100;
/// Nanoseconds until a program that does not answer counts as failed.
const PATIENCE: u64 = 20_000_000_000;

/// Program of the bench, ended with it.
pub(crate) struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts the program on one CPU, so that it ends with the bench.
    fn start(words: &[String], home: &Home, log: &Path, cpu: usize, fifo: bool) -> Result<Self, Trouble> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "taskset", "-c", &cpu.to_string()]);
        if fifo {
            command.args(["chrt", "-f", "1"]);
        }
        let out = File::options().create(true).append(true).open(log)?;
        command.args(words).env_clear().envs(&home.env).current_dir(home.path());
        if words[0].ends_with("mock-llama") {
            command.env("MOCK_LLAMA_CPU", LOAD.to_string());
        }
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child =
            command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn().context("setpriv")?;
        Ok(Self { child, log: log.to_owned() })
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// Waits for a value, as long as the program runs.
    fn until<T>(&mut self, what: &str, mut get: impl FnMut() -> Option<T>) -> Result<T, Trouble> {
        let end = now() + PATIENCE;
        loop {
            if let Some(value) = get() {
                return Ok(value);
            }
            if now() > end || self.child.try_wait()?.is_some() {
                let said = std::fs::read_to_string(&self.log).unwrap_or_default();
                return Err(Trouble::new(format!("{what}: not so; it said:\n{said}")));
            }
            pause();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let Some(pid) = Pid::from_raw(self.pid()) else { return };
        let _gone = kill_process(pid, Signal::TERM);
        for _ in 0..1000 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            pause();
        }
        let _gone = kill_process_group(pid, Signal::KILL);
        let _reaped = self.child.wait();
    }
}

struct Viewers {
    _program: Program,
    page: SocketAddr,
    count: usize,
}

impl Viewers {
    fn look(&self) -> bool {
        connections(self.page) >= self.count
    }
}

pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) target: Target,
    /// Upstream of the peer, for its counts.
    pub(crate) upstream: Upstream,
    /// Processes of the proxy; none for the mock itself.
    pub(crate) pids: Vec<i32>,
    /// Milliseconds from the start to the first answer.
    pub(crate) started_ms: f64,
    program: Option<Program>,
    viewers: Option<Viewers>,
    logs: Vec<PathBuf>,
    upstream_pid: i32,
    _setup: Option<Setup>,
}

#[derive(Debug, Clone)]
pub(crate) enum Upstream {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Peer {
    pub(crate) fn forget_logs(&self) -> Result<(), Trouble> {
        for log in &self.logs {
            if log.exists() {
                File::options().write(true).open(log)?.set_len(0)?;
            }
        }
        Ok(())
    }

    /// Fails if a viewer has stopped, because the measurement would be worthless.
    pub(crate) fn is_looked_at(&self) -> Result<(), Trouble> {
        let all = self.viewers.as_ref().is_none_or(Viewers::look);
        if all { Ok(()) } else { Err(Trouble::new("those who looked at the page have gone")) }
    }

    /// Returns the end of the logs, for an error.
    pub(crate) fn last_words(&self) -> String {
        let mut words = String::new();
        for log in &self.logs {
            let text = std::fs::read_to_string(log).unwrap_or_default();
            let from = text.char_indices().rev().nth(2000).map_or(0, |(at, _)| at);
            words.push_str(&text[from..]);
        }
        words
    }

    /// Puts load and proxy on one CPU, or the proxy on its own.
    pub(crate) fn place(&self, one_cpu: bool) -> Result<(), Trouble> {
        let cpu = if one_cpu { PROXY } else { LOAD };
        pin(i32::try_from(std::process::id())?, cpu)?;
        pin(self.upstream_pid, cpu)
    }

    /// Stops the proxy, and waits for its end.
    pub(crate) fn finish(mut self) -> Result<(), Trouble> {
        let Some(mut program) = self.program.take() else { return Ok(()) };
        let pid = Pid::from_raw(program.pid()).context("a process without a number")?;
        kill_process(pid, Signal::TERM)?;
        let end = now() + PATIENCE;
        while program.child.try_wait()?.is_none() {
            if now() > end {
                return Err(Trouble::new(format!("{} does not end:\n{}", self.name, self.last_words())));
            }
            pause();
        }
        Ok(())
    }

    pub(crate) fn counts(&self) -> Result<serde_json::Value, Trouble> {
        use std::io::{Read as _, Write as _};
        let text = |mut stream: Box<dyn ReadWrite>| {
            stream.write_all(b"GET /mock/counts HTTP/1.1\r\nHost: mock\r\n\r\n")?;
            let mut bytes = vec![0; 4096];
            let count = stream.read(&mut bytes)?;
            bytes.truncate(count);
            Ok::<_, std::io::Error>(bytes)
        };
        let bytes = match &self.upstream {
            Upstream::Tcp(address) => text(Box::new(std::net::TcpStream::connect(address)?))?,
            Upstream::Unix(path) => text(Box::new(std::os::unix::net::UnixStream::connect(path)?))?,
        };
        let body = bytes.split(|byte| *byte == b'\n').next_back().unwrap_or_default();
        Ok(serde_json::from_slice(body)?)
    }
}

trait ReadWrite: std::io::Read + std::io::Write {}
impl<T: std::io::Read + std::io::Write> ReadWrite for T {}

/// Starts the peers; holds the mock for all of them that use TCP.
pub(crate) struct Stage {
    home: Home,
    /// Access logs, in memory, because the speed of the disk is not the subject.
    logs: TempDir,
    mock: SocketAddr,
    mock_pid: i32,
    fifo: bool,
    _mock: Program,
}

impl Stage {
    pub(crate) fn new(options: &Options) -> Result<Self, Trouble> {
        let home = Home::new()?;
        let shared = Path::new("/dev/shm");
        let logs = if shared.is_dir() { tempfile::tempdir_in(shared)? } else { tempfile::tempdir()? };
        let mock = free_port()?;
        let program = mock_llama()?;
        let words = [&program, "--host", "127.0.0.1", "--port", &mock.port().to_string()].map(str::to_owned);
        let log = logs.path().join("mock.log");
        let mut program = Program::start(&words, &home, &log, LOAD, options.fifo)?;
        let target = Target { address: mock, key: None };
        program.until("the mock answers", || answers(&target).then_some(()))?;
        Ok(Self { home, logs, mock, mock_pid: program.pid(), fifo: options.fifo, _mock: program })
    }

    /// Returns the mock itself as a peer.
    pub(crate) fn direct(&self) -> Peer {
        Peer {
            name: "direct".to_owned(),
            target: Target { address: self.mock, key: None },
            upstream: Upstream::Tcp(self.mock),
            pids: Vec::new(),
            started_ms: 0.0,
            program: None,
            viewers: None,
            logs: Vec::new(),
            upstream_pid: self.mock_pid,
            _setup: None,
        }
    }

    /// Starts Debian's nginx: one worker, connections kept on both sides, no buffering.
    pub(crate) fn nginx(&self) -> Result<Peer, Trouble> {
        let (folder, port) = (self.home.path().join("nginx"), free_port()?);
        std::fs::create_dir_all(&folder)?;
        let access = self.logs.path().join(format!("nginx-{}.log", port.port()));
        let (at, mock, access_log) = (folder.display(), self.mock, access.display());
        let config = format!(
            "worker_processes 1; daemon off; pid {at}/pid; error_log {at}/error.log; user root; worker_rlimit_nofile 20000;
events {{ worker_connections 8192; }}
http {{
  access_log {access_log};
  client_body_temp_path {at}/body; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;
  keepalive_timeout 75s; keepalive_requests 1000000000; client_max_body_size 64m; tcp_nodelay on;
  upstream mock {{ server {mock}; keepalive {SLOTS}; keepalive_requests 1000000000; keepalive_timeout 60s; }}
  server {{
    listen {port} backlog=4096;
    location / {{
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection \"\";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 3600s;
    }}
  }}
}}
"
        );
        let config = self.home.file("nginx/nginx.conf", config)?;
        let words = ["nginx", "-p", &folder.display().to_string(), "-c", &config.display().to_string()];
        self.peer("nginx", Target { address: port, key: None }, None, &words.map(str::to_owned), vec![access])
    }

    /// Starts Debian's haproxy with one thread.
    pub(crate) fn haproxy(&self) -> Result<Peer, Trouble> {
        let (port, mock) = (free_port()?, self.mock);
        let config = format!(
            "global
  maxconn 8192
  nbthread 1
  log stdout format raw local0
defaults
  mode http
  log global
  option httplog
  option http-keep-alive
  option http-no-delay
  http-reuse always
  timeout connect 1s
  timeout client 3600s
  timeout server 3600s
  timeout http-keep-alive 75s
frontend clients
  bind {port} backlog 4096
  default_backend mock
backend mock
  server mock {mock} pool-max-conn {SLOTS} pool-purge-delay 60s
"
        );
        let config = self.home.file("haproxy.cfg", config)?;
        let words = ["haproxy", "-db", "-f", &config.display().to_string()].map(str::to_owned);
        self.peer("haproxy", Target { address: port, key: None }, None, &words, Vec::new())
    }

    /// Starts llama-swap, which normally starts its models; here it gets a running one.
    pub(crate) fn llama_swap(&self) -> Result<Peer, Trouble> {
        let port = free_port()?;
        let config = format!(
            "models:\n  \"{MODEL}\":\n    proxy: \"http://{}\"\n    cmd: \"sleep 86400\"\n    checkEndpoint: \"none\"\n    concurrencyLimit: {SLOTS}\n",
            self.mock
        );
        let config = self.home.file("llama-swap.yaml", config)?;
        let words = ["llama-swap", "--config", &config.display().to_string(), "--listen", &port.to_string()];
        let mut peer = self.peer(
            "llama-swap",
            Target { address: port, key: None },
            None,
            &words.map(str::to_owned),
            Vec::new(),
        )?;
        peer.pids.truncate(1);
        Ok(peer)
    }

    fn peer(
        &self,
        name: &str,
        target: Target,
        setup: Option<Setup>,
        words: &[String],
        mut logs: Vec<PathBuf>,
    ) -> Result<Peer, Trouble> {
        let log = self.logs.path().join(format!("{name}-{}.out", target.address.port()));
        let begin = now();
        let home = setup.as_ref().map_or(&self.home, |setup| &setup.home);
        let mut program = Program::start(words, home, &log, PROXY, self.fifo)?;
        program.until(&format!("{name} answers"), || answers(&target).then_some(()))?;
        let started_ms = milliseconds(begin);
        logs.push(log);
        Ok(Peer {
            name: name.to_owned(),
            target,
            upstream: Upstream::Tcp(self.mock),
            pids: family(program.pid()),
            started_ms,
            program: Some(program),
            viewers: None,
            logs,
            upstream_pid: self.mock_pid,
            _setup: setup,
        })
    }

    /// Starts llama-warden in callgrind, with all usual functions and the mock as a remote. callgrind writes its
    /// report when llama-warden ends.
    pub(crate) fn warden_in_callgrind(&self, report: &Path) -> Result<Peer, Trouble> {
        let port = free_port()?;
        let access = self.logs.path().join(format!("warden-{}.access", port.port()));
        let setup = crate::warden::remote_setup(self.mock, &access)?;
        let config = setup.home.file("warden.toml", setup.config())?;
        let mut words = vec!["valgrind".to_owned(), "--tool=callgrind".to_owned()];
        words.push(format!("--callgrind-out-file={}", report.display()));
        words.extend([binaries::llama_warden()?.display().to_string(), "serve".to_owned()]);
        words.extend(["--config".to_owned(), config.display().to_string()]);
        words.extend(["--port".to_owned(), port.port().to_string()]);
        let target = Target { address: port, key: Some(crate::warden::KEY.to_owned()) };
        self.peer(crate::warden::NAME, target, Some(setup), &words, vec![access])
    }

    /// Starts llama-warden with all usual functions, and a mock of its own as llama-server.
    pub(crate) fn warden(&self, variant: &Variant) -> Result<Peer, Trouble> {
        let port = free_port()?;
        let access = self.logs.path().join(format!("warden-{}.access", port.port()));
        let setup = crate::warden::setup(&mock_llama()?, SLOTS, &access)?;
        let config = setup.home.file("warden.toml", setup.config())?;
        let binary = match &variant.binary {
            Some(binary) => binary.clone(),
            None => binaries::llama_warden()?,
        };
        let mut words = vec![binary.display().to_string(), "serve".to_owned()];
        words.extend(["--config".to_owned(), config.display().to_string()]);
        words.extend(["--port".to_owned(), port.port().to_string()]);
        words.extend(["--set".to_owned(), crate::warden::connections(&binary)?]);
        words.extend(["--set", "child.measure=true"].map(str::to_owned));
        words.extend(variant.sets.iter().flat_map(|set| ["--set".to_owned(), set.clone()]));
        let page = (variant.viewers > 0).then(free_port).transpose()?;
        words.extend(page.iter().flat_map(|page| ["--set".to_owned(), format!("admin.address={page}")]));
        let target = Target { address: port, key: Some(crate::warden::KEY.to_owned()) };
        let log = self.logs.path().join(format!("warden-{}.log", port.port()));
        let begin = now();
        let mut program = Program::start(&words, &setup.home, &log, PROXY, self.fifo)?;
        program.until("llama-warden answers", || answers(&target).then_some(()))?;
        let started_ms = milliseconds(begin);
        // Until the measurement of unread bodies is done, each of them ends its connection.
        let measured = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("measured: "));
        program.until("llama-warden has measured the mock", || measured().then_some(()))?;
        let pid = program.pid();
        let upstream = program.until("its mock runs", || {
            let children = warden_rig::process::children_of(pid);
            children.into_iter().find(|child| child.socket().is_some())
        })?;
        let socket = upstream.socket().context("a mock without an address")?;
        let line = upstream.command_line();
        let at = line.iter().position(|word| word == "--port").and_then(|at| line.get(at + 1));
        let upstream_at = match at {
            Some(port) if socket.extension().is_none() => {
                Upstream::Tcp(format!("{}:{port}", socket.display()).parse()?)
            }
            _ => Upstream::Unix(socket),
        };
        let looked_at = page.map(|page| self.viewers(page, variant.viewers, &setup.home)).transpose()?;
        Ok(Peer {
            name: if variant.name.is_empty() { crate::warden::NAME.to_owned() } else { variant.name.clone() },
            target,
            upstream: upstream_at,
            pids: vec![pid],
            started_ms,
            program: Some(program),
            viewers: looked_at,
            logs: vec![access, log],
            upstream_pid: upstream.pid,
            _setup: Some(setup),
        })
    }

    fn viewers(&self, page: SocketAddr, count: usize, home: &Home) -> Result<Viewers, Trouble> {
        let own = std::env::current_exe()?.display().to_string();
        let words = [own, crate::viewers::WORD.to_owned(), page.to_string(), count.to_string()];
        let log = self.logs.path().join(format!("viewers-{}.log", page.port()));
        let mut program = Program::start(&words, home, &log, crate::viewers::cpu(), self.fifo)?;
        // Without all viewers the measurement would be worthless.
        let look = || (connections(page) >= count).then_some(());
        program.until("the page is looked at", look)?;
        Ok(Viewers { _program: program, page, count })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // End the programs before their directories are removed.
        drop(self.viewers.take());
        drop(self.program.take());
    }
}

/// Returns all available peers, and the reasons why others are missing.
pub(crate) fn peers(stage: &Stage, options: &Options) -> Result<(Vec<Peer>, Vec<String>), Trouble> {
    type Make<'a> = &'a dyn Fn() -> Result<Peer, Trouble>;
    let (mut peers, mut missing) = (vec![stage.direct()], Vec::new());
    let makers: [(&str, Make<'_>); 3] = [
        ("nginx", &|| stage.nginx()),
        ("haproxy", &|| stage.haproxy()),
        ("llama-swap", &|| stage.llama_swap()),
    ];
    for (name, make) in makers {
        if !has(name) {
            missing.push(format!("{name}: not installed, left out"));
        } else if name == "nginx" || options.wants_peer(name) {
            match make() {
                Ok(peer) => peers.push(peer),
                Err(trouble) => missing.push(format!("{name}: left out, {trouble}")),
            }
        }
    }
    peers.push(stage.warden(&Variant::default())?);
    for variant in &options.variants {
        peers.push(stage.warden(variant)?);
    }
    Ok((peers, missing))
}

fn answers(target: &Target) -> bool {
    Stream::connect(target.address).is_ok()
        && crate::load::requests::closed(target, &target.small(), 1, crate::load::requests::Until::Answers(1))
            .is_ok()
}

fn connections(to: SocketAddr) -> usize {
    let entries = procfs::net::tcp().unwrap_or_default();
    let stands = |entry: &&procfs::net::TcpNetEntry| entry.state == procfs::net::TcpState::Established;
    entries.iter().filter(stands).filter(|entry| entry.remote_address == to).count()
}

fn milliseconds(begin: u64) -> f64 {
    crate::load::requests::seconds(now() - begin) * 1000.0
}

fn free_port() -> Result<SocketAddr, Trouble> {
    Ok(SocketAddr::from(([127, 0, 0, 1], warden_rig::ports::free()?)))
}

fn mock_llama() -> Result<String, Trouble> {
    Ok(binaries::mock_llama()?.display().to_string())
}
