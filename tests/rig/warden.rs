//! Runs `llama-warden serve` with its own home, configuration, port and admin socket.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::home::{Home, Ran};
use crate::process::{Kid, ProcessId};
use crate::wait::wait_for;
use crate::{Context as _, Http, Identity, Ledger, Outcome, Trouble, binaries, wait_until};

/// A busy build machine may need this time.
pub const SOON: Duration = Duration::from_secs(30);

/// Log text before the scheme and port of the listener.
const LISTENING: &str = "listening on http";

/// Configuration of a llama-warden to start.
#[derive(Debug)]
pub struct Setup {
    /// Home of the llama-warden.
    pub home: Home,
    top: String,
    models: String,
}

impl Setup {
    /// Creates a configuration with a port of the system's choice and an admin socket.
    ///
    /// # Errors
    /// There is no temporary directory.
    pub fn new() -> Result<Self, Trouble> {
        let home = Home::new()?;
        home.file("model.gguf", "GGUF")?;
        Ok(Self { home, top: String::new(), models: String::new() })
    }

    /// Adds TOML outside of models: dotted keys or whole tables.
    #[must_use]
    pub fn top(mut self, toml: &str) -> Self {
        self.top.push_str(toml);
        self.top.push('\n');
        self
    }

    /// Adds `[models."name"]` with these lines. By default a backend's death is reported to the client,
    /// because most tests check that report.
    #[must_use]
    pub fn model(mut self, name: &str, toml: &str) -> Self {
        let on_death = if toml.contains("on_death") { "" } else { "on_death = \"error\"\n" };
        let _infallible = write!(self.models, "\n[models.\"{name}\"]\n{on_death}{toml}\n");
        self
    }

    /// Adds a model that runs fake-llama with this script, at once unless the extra lines say otherwise.
    /// [`Warden::script`] changes the script later.
    ///
    /// # Errors
    /// A file cannot be written, or fake-llama cannot be built.
    pub fn fake(self, name: &str, script: &Value, toml: &str) -> Result<Self, Trouble> {
        let lines = self.fake_lines(name, script, toml)?;
        Ok(self.model(name, &lines))
    }

    fn fake_lines(&self, name: &str, script: &Value, toml: &str) -> Result<String, Trouble> {
        let script = self.home.file(&script_file(name), script.to_string())?;
        let mut lines = format!(
            "binary = '{}'\nmodel = '{}'\nenv = {{ FAKE_LLAMA_SCRIPT = '{}', FAKE_LLAMA_LEDGER = '{}' }}\n",
            binaries::fake_llama()?.display(),
            self.home.path().join("model.gguf").display(),
            script.display(),
            self.home.path().join("ledger.jsonl").display(),
        );
        if !toml.contains("args =") {
            lines.push_str("args = [\"-np\", \"4\", \"--metrics\"]\n");
        }
        if !toml.contains("preload") {
            lines.push_str("preload = true\n");
        }
        lines.push_str(toml);
        Ok(lines)
    }

    /// Configuration as text.
    pub fn config(&self) -> String {
        let admin = self.home.path().join("admin.sock");
        let mut text = String::new();
        if !self.top.contains("server.port") {
            text.push_str("server.port = 0\n");
        }
        let _infallible = write!(text, "admin.socket = '{}'\n{}{}", admin.display(), self.top, self.models);
        text
    }

    /// Starts llama-warden and waits until it listens, not until models are ready.
    ///
    /// # Errors
    /// llama-warden does not listen; the error has its output.
    pub async fn start(self) -> Result<Warden, Trouble> {
        let config = self.home.file("warden.toml", self.config())?;
        let args = vec![OsString::from("serve"), "--config".into(), config.into()];
        self.start_with(&args).await
    }

    /// Starts llama-warden with these arguments instead of the configuration file.
    ///
    /// # Errors
    /// The same as for [`Self::start`].
    pub async fn start_with(self, args: &[OsString]) -> Result<Warden, Trouble> {
        self.start_program(&binaries::llama_warden()?, args).await
    }

    /// Starts another program that behaves like `llama-warden serve`, such as a link to it.
    ///
    /// # Errors
    /// The same as for [`Self::start`].
    pub async fn start_program(self, program: &Path, args: &[OsString]) -> Result<Warden, Trouble> {
        let (kid, address) = self.listening(program, args).await?;
        Ok(Warden { kid, http: Http::Tcp(address), address, setup: self })
    }

    async fn listening(&self, program: &Path, args: &[OsString]) -> Result<(Kid, SocketAddr), Trouble> {
        let log = self.home.path().join("warden.log");
        let mut kid = Kid::start(program, args, &self.home.env, self.home.path(), log)?;
        kid.says(LISTENING, SOON).await?;
        let address =
            wait_for("a whole line with the address", SOON, async || address_in(&kid.output())).await?;
        Ok((kid, address))
    }
}

fn script_file(model: &str) -> String {
    format!("scripts/{}.json", model.replace('/', "_"))
}

/// Returns the first address after the phrase, once the character after the address has been written.
pub(crate) fn address_in(output: &str) -> Option<SocketAddr> {
    let after = output.split_once(LISTENING)?.1.trim_start_matches('s').strip_prefix("://")?;
    let end = after.find(|c: char| !(c.is_ascii_alphanumeric() || ".:[]".contains(c)))?;
    after[..end].parse().ok()
}

/// Running llama-warden.
#[derive(Debug)]
pub struct Warden {
    /// Process of llama-warden.
    pub kid: Kid,
    /// Client of the public listener.
    pub http: Http,
    address: SocketAddr,
    /// Home and configuration.
    pub setup: Setup,
}

impl Warden {
    /// URL of the public listener: `http://127.0.0.1:PORT`, or with `https`.
    pub fn url(&self) -> String {
        let scheme = if self.kid.output().contains("listening on https://") { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Client of the public listener that trusts this certificate.
    pub fn https(&self, identity: &Identity) -> Http {
        Http::Tls(self.address, Box::new(identity.clone()))
    }

    /// Returns a metric by its name with labels; `None` if llama-warden does not report it.
    ///
    /// # Errors
    /// The admin socket does not answer.
    pub async fn metric(&self, name: &str) -> Result<Option<f64>, Trouble> {
        let text = self.admin().get("/metrics").await?.text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.and_then(|number| number.parse().ok()))
    }

    /// Waits until all these lines are in the metrics, which may be counted after an answer is sent.
    ///
    /// # Errors
    /// A line is missing after [`SOON`]; the error names it and shows the metrics.
    pub async fn until_metrics<S: AsRef<str>>(&self, lines: &[S]) -> Result<String, Trouble> {
        let (mut text, mut missing) = (String::new(), Vec::new());
        let all = wait_until("the metrics have all lines", SOON, async || {
            text = self.admin().get("/metrics").await.map(|whole| whole.text()).unwrap_or_default();
            let is_there = |line: &&str| text.lines().any(|have| have == *line);
            missing = lines.iter().map(AsRef::as_ref).filter(|line| !is_there(line)).collect();
            missing.is_empty()
        });
        match all.await {
            Ok(()) => Ok(text),
            Err(late) => Err(Trouble::new(format!("{late}; missing: {missing:?} in\n{text}"))),
        }
    }

    /// Address of the public listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Client of the admin socket.
    pub fn admin(&self) -> Http {
        Http::Unix(self.admin_socket())
    }

    /// Path of the admin socket.
    pub fn admin_socket(&self) -> PathBuf {
        self.home().path().join("admin.sock")
    }

    /// Restarts a model several times, one after another.
    ///
    /// # Errors
    ///
    /// A restart fails.
    pub async fn restart(&self, model: &str, times: usize) -> Outcome {
        for _ in 0..times {
            let ran = self.cli(&["restart", model]).await?;
            if ran.code != 0 {
                return Err(Trouble::new(format!("restart: {ran:?}")));
            }
        }
        Ok(())
    }

    /// Home of this llama-warden.
    pub fn home(&self) -> &Home {
        &self.setup.home
    }

    /// Ledger of this llama-warden's fakes.
    pub fn ledger(&self) -> Ledger {
        Ledger::at(&self.home().path().join("ledger.jsonl"))
    }

    /// Children that are llama-servers: their arguments name a socket.
    pub fn backends(&self) -> Vec<ProcessId> {
        self.kid.children().into_iter().filter(|child| child.socket().is_some()).collect()
    }

    /// Path of llama-warden's own ledger of replacements.
    pub fn recycles(&self) -> PathBuf {
        self.home().path().join("state/llama-warden/ledger.jsonl")
    }

    /// Status of a model, from `GET /status` of the admin socket.
    ///
    /// # Errors
    /// The request fails, or the model is unknown.
    pub async fn status(&self, model: &str) -> Result<Value, Trouble> {
        let status = self.admin().get("/status").await?.json()?;
        let models = status["fleet"]["models"].as_array().context("no models in the status")?;
        let found = models.iter().find(|entry| entry["name"] == model);
        found.cloned().context(format!("no model {model} in {status}"))
    }

    /// Number of requests that wait for a model.
    ///
    /// # Errors
    /// The same as for [`Self::status`].
    pub async fn waiting(&self, model: &str) -> Result<usize, Trouble> {
        let waiting =
            self.status(model).await?["waiting"].as_u64().context("no number of waiting requests")?;
        Ok(usize::try_from(waiting)?)
    }

    /// State of a model: `unloaded`, `loading`, `loaded`, `draining`, `backoff`, `failed`.
    ///
    /// # Errors
    /// The same as for [`Self::status`].
    pub async fn state(&self, model: &str) -> Result<String, Trouble> {
        Ok(self.status(model).await?["state"].as_str().context("no state")?.to_owned())
    }

    /// Starts llama-warden again, after its end, in the same home with the same configuration.
    ///
    /// # Errors
    /// The same as for [`Setup::start`].
    pub async fn again(self) -> Result<Self, Trouble> {
        self.setup.start().await
    }

    /// Starts another program after the end of this one, as [`Setup::start_program`] does.
    ///
    /// # Errors
    /// The same as for [`Setup::start`].
    pub async fn start_anew(&mut self, program: &Path, args: &[OsString]) -> Outcome {
        let (kid, address) = self.setup.listening(program, args).await?;
        self.kid = kid;
        self.http = Http::Tcp(address);
        self.address = address;
        Ok(())
    }

    /// Waits for this number of backends that answer `/health` with 200 and that llama-warden knows to be
    /// ready.
    ///
    /// # Errors
    /// The backends are not ready within [`SOON`].
    pub async fn until_ready(&self, backends: usize) -> Result<Vec<ProcessId>, Trouble> {
        let what = format!("{backends} ready backends");
        wait_for(&what, SOON, async || {
            let found = self.backends();
            if found.len() != backends {
                return None;
            }
            for backend in &found {
                let health = backend.http()?.get("/health").await.ok()?;
                health.status.is_success().then_some(())?;
            }
            let status = self.admin().get("/status").await.ok()?.json().ok()?;
            let models = status["fleet"]["models"].as_array()?.iter();
            let processes =
                models.flat_map(|model| model["backends"].as_array().cloned().unwrap_or_default());
            let ready = processes.filter(|one| one["phase"] == "ready" && !one["pid"].is_null()).count();
            (ready == backends).then_some(found)
        })
        .await
    }

    /// Replaces fields of the script of a running fake, and of its later generations.
    ///
    /// # Errors
    /// A field does not exist.
    pub async fn script(&self, model: &str, patch: &Value) -> Result<(), Trouble> {
        let file = self.home().path().join(script_file(model));
        let mut script: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        if let (Some(all), Some(patch)) = (script.as_object_mut(), patch.as_object()) {
            all.extend(patch.clone());
        }
        std::fs::write(&file, script.to_string())?;
        for backend in self.backends() {
            if backend.variable("FAKE_LLAMA_SCRIPT").as_deref() != Some(file.as_os_str()) {
                continue;
            }
            let http = backend.http().context("a fake was told where to listen")?;
            let answer = http.post("/fake/script", patch).await?;
            if !answer.status.is_success() {
                return Err(Trouble::new(answer.text()));
            }
        }
        Ok(())
    }

    /// Runs another `llama-warden` in the same home, where it finds this one by itself.
    ///
    /// # Errors
    /// The program does not end.
    pub async fn cli(&self, args: &[&str]) -> Result<Ran, Trouble> {
        self.home().warden(args, SOON).await
    }

    /// Writes this configuration and sends SIGHUP.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn reload(&mut self, config: &str) -> Result<(), Trouble> {
        self.home().file("warden.toml", config)?;
        self.kid.signal(Signal::HUP);
        Ok(())
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// llama-warden still runs after `deadline`.
    pub async fn terminate(&mut self, deadline: Duration) -> Result<i32, Trouble> {
        self.kid.signal(Signal::TERM);
        self.kid.exit(deadline).await
    }

    /// Waits until a text appears in the output.
    ///
    /// # Errors
    /// The text does not appear within [`SOON`].
    pub async fn says(&mut self, text: &str) -> Result<String, Trouble> {
        self.kid.says(text, SOON).await
    }

    /// Waits until none of `processes` runs.
    ///
    /// # Errors
    /// A process still runs after `deadline`.
    pub async fn until_gone(processes: &[ProcessId], deadline: Duration) -> Result<(), Trouble> {
        wait_until(&format!("{processes:?} have ended"), deadline, async || {
            processes.iter().all(|process| !process.is_alive())
        })
        .await
    }
}

/// Creates a chat request whose answer is always the same: temperature 0 and a fixed seed.
pub fn chat(id: &str, model: &str, words: &str, tokens: u64, stream: bool) -> Value {
    json!({
        "user": id, "model": model, "stream": stream, "max_tokens": tokens, "temperature": 0, "seed": 7,
        "messages": [{"role": "user", "content": words}],
    })
}

/// Path of chat requests.
pub const CHAT: &str = "/v1/chat/completions";

/// Reads a JSON Lines file; returns nothing if there is no file.
///
/// # Errors
/// The file cannot be read, or a line is not JSON.
pub fn json_lines(path: &Path) -> Result<Vec<Value>, Trouble> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(path)?;
    text.lines().map(|line| serde_json::from_str(line).context(format!("line {line:?}"))).collect()
}
