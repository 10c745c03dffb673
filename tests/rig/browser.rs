//! Runs scripts of `tests/browser/` in a real browser: Debian's chromium, driven by npm packages that are
//! pinned by version and hash and installed in the test store.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::home::Home;
use crate::optional::{SharedMeans, or_skipped};
use crate::{Context as _, Trouble, binaries};

/// Set in CI, where a missing browser is a failure.
pub const REQUIRED_VARIABLE: &str = "WARDEN_TEST_BROWSER";

/// A slow registry may need this time.
const INSTALL: Duration = Duration::from_secs(300);
/// Limit for a script on a busy machine.
const WALK: Duration = Duration::from_secs(240);

/// Browser, and the packages that drive it.
#[derive(Debug, Clone)]
pub struct Browser {
    program: PathBuf,
    packages: PathBuf,
}

fn walks() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("browser")
}

impl Browser {
    /// Finds the browser and installs its packages; prints a line and returns `None` if it is missing and not
    /// required.
    ///
    /// # Errors
    /// The browser is missing, but required.
    pub async fn here() -> Result<Option<Self>, Trouble> {
        static FOUND: SharedMeans<Browser> = SharedMeans::new();
        let found = FOUND.get(Self::find).await;
        or_skipped("no browser", REQUIRED_VARIABLE, found)
    }

    async fn find() -> Result<Self, Trouble> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = std::env::split_paths(&path)
            .flat_map(|folder| ["chromium", "chromium-browser"].map(|name| folder.join(name)))
            .find(|program| program.is_file())
            .context("no chromium in PATH (`apt install chromium`)")?;
        let mut hash = Sha256::new();
        for name in ["package.json", "package-lock.json"] {
            let path = walks().join(name);
            hash.update(std::fs::read(&path).context(path.display())?);
        }
        let hash = hex::encode(hash.finalize());
        let packages = binaries::store()?.join("browser").join(hash.get(..16).unwrap_or_default());
        let complete = packages.join("complete");
        if complete.exists() {
            return Ok(Self { program, packages });
        }
        // Start a half-made installation over.
        if packages.exists() {
            std::fs::remove_dir_all(&packages)?;
        }
        std::fs::create_dir_all(&packages)?;
        for name in ["package.json", "package-lock.json"] {
            std::fs::copy(walks().join(name), packages.join(name))?;
        }
        let mut home = Home::new()?;
        // The registry's address and certificates come from this machine's environment.
        home.env = std::env::vars_os().collect();
        let mut words: Vec<OsString> =
            ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"].map(OsString::from).into();
        words.push(packages.clone().into());
        let ran = home.run(Path::new("npm"), words, INSTALL).await?;
        if ran.code != 0 {
            return Err(Trouble::new(format!("npm: {}", ran.all())));
        }
        std::fs::write(complete, "")?;
        Ok(Self { program, packages })
    }

    /// Starts a script that tries the actions of the page at `url` on `model`.
    ///
    /// # Errors
    /// The script cannot be started.
    pub fn walk(&self, url: &str, model: &str) -> Result<Walk, Trouble> {
        self.begin("walk.mjs", url, std::iter::once(OsStr::new(model)))
    }

    /// Starts taking screenshots of the page at `url`, of its overview and of the memory of `model`, into
    /// `folder`.
    ///
    /// # Errors
    /// The script cannot be started.
    pub fn pictures(&self, url: &str, model: &str, folder: &Path) -> Result<Walk, Trouble> {
        self.begin("pictures.mjs", url, [OsStr::new(model), folder.as_os_str()].into_iter())
    }

    /// Starts signing in at `url` with one key after the other; the actions that the last key allows are
    /// tried on `model`.
    ///
    /// # Errors
    /// The script cannot be started.
    pub fn rights(&self, url: &str, model: &str, keys: &[&str]) -> Result<Walk, Trouble> {
        self.begin("rights.mjs", url, [model].iter().chain(keys).map(OsStr::new))
    }

    fn begin<'a>(
        &self,
        script: &str,
        url: &str,
        words: impl Iterator<Item = &'a OsStr>,
    ) -> Result<Walk, Trouble> {
        let home = Home::new()?;
        let mut command = Command::new("node");
        command.arg(walks().join(script)).arg(url).arg(&self.packages).arg(&self.program).args(words);
        command.env("HOME", home.path()).env("TZ", "UTC");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("node")?;
        let words = child.stdin.take().context("no input")?;
        let answers = BufReader::new(child.stdout.take().context("no output")?).lines();
        Ok(Walk { child, words, answers, _home: home })
    }
}

impl Browser {
    /// Loads the page at `url` repeatedly; returns the milliseconds of each part, by name.
    ///
    /// # Errors
    /// The script cannot be started, takes too long, or prints something else.
    pub async fn paint(&self, url: &str, rounds: usize) -> Result<Value, Trouble> {
        let home = Home::new()?;
        let mut command = Command::new("node");
        command.arg(walks().join("paint.mjs")).arg(url).arg(&self.packages).arg(&self.program);
        command.arg(rounds.to_string()).env("HOME", home.path()).env("TZ", "UTC");
        let ran = timeout(WALK, command.kill_on_drop(true).output()).await.context("it takes too long")?;
        let ran = ran.context("node")?;
        let said = String::from_utf8_lossy(&ran.stderr);
        serde_json::from_slice(&ran.stdout).context(said)
    }
}

/// Running browser script.
#[derive(Debug)]
pub struct Walk {
    child: Child,
    words: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    _home: Home,
}

impl Walk {
    /// Returns the script's next line.
    ///
    /// # Errors
    /// The script has ended, or prints nothing for too long.
    pub async fn says(&mut self) -> Result<Value, Trouble> {
        let line = timeout(WALK, self.answers.next_line()).await.context("the walk takes too long")??;
        if let Some(line) = line {
            return serde_json::from_str(&line).context(line);
        }
        let mut text = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            tokio::io::AsyncReadExt::read_to_string(&mut errors, &mut text).await?;
        }
        Err(Trouble::new(format!("the walk ended: {text}")))
    }

    /// Sends the script a word, and returns its next line.
    ///
    /// # Errors
    /// The same as for [`Self::says`].
    pub async fn asked(&mut self, word: &str) -> Result<Value, Trouble> {
        self.words.write_all(format!("{word}\n").as_bytes()).await?;
        self.words.flush().await?;
        self.says().await
    }
}
