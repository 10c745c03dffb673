//! Repositories of simulated servers that are built like llama.cpp, and the tools for building them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use warden_rig::home::Home;
use warden_rig::{Context as _, Outcome, Trouble, binaries};

/// Gives a home the store's build tools, and a store of its own.
pub(crate) fn tools(home: &mut Home) -> Outcome {
    home.env.insert("LLAMA_WARDEN_PATHS__CACHE_DIR".into(), binaries::store()?.join("cache").into());
    let data = home.path().join("data");
    home.env.insert("LLAMA_WARDEN_PATHS__DATA_DIR".into(), data.into());
    for name in ["PIP_CERT", "PIP_FIND_LINKS", "CCACHE_DIR", "SSL_CERT_FILE"] {
        if let Some(value) = std::env::var_os(name) {
            home.env.insert(name.into(), value);
        }
    }
    Ok(())
}

/// A tree that is built like llama.cpp; its program runs fake-llama.
const CMAKE: &str = "cmake_minimum_required(VERSION 3.14)
project(\"llama.cpp\" C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(llama-server tools/server/server.c)
";

/// Reads the number of the commit from the last line of the program.
const NUMBER: &str = "file(STRINGS tools/server/server.c number REGEX \"^/. [0-9]+ ./$\")
string(REGEX REPLACE \"[^0-9]\" \"\" number \"${number}\")
";

/// C source of the program with the planted lines.
fn server(planted: &str) -> Result<String, Trouble> {
    let fake = binaries::fake_llama()?;
    Ok(format!(
        "#include <stdlib.h>\n#include <unistd.h>\nint main(int argc, char ** argv) {{\n    (void) argc;\n{planted}\n    \
         execv(\"{}\", argv);\n    return 127;\n}}\n",
        fake.display()
    ))
}

pub(crate) fn sets(name: &str, value: &str) -> String {
    format!("    setenv(\"FAKE_LLAMA_{name}\", \"{value}\", 1);")
}

/// A repository with one commit for each planted text.
pub(crate) struct History {
    pub(crate) folder: PathBuf,
}

impl History {
    pub(crate) fn new(folder: PathBuf, planted: &[&str]) -> Result<Self, Trouble> {
        Self::configured(folder, "", planted)
    }

    /// Like `new`, with more lines of CMake; `${number}` is the number of the commit.
    pub(crate) fn configured(folder: PathBuf, more: &str, planted: &[&str]) -> Result<Self, Trouble> {
        let history = Self { folder };
        let cmake = if more.is_empty() { CMAKE.to_owned() } else { format!("{CMAKE}{NUMBER}{more}") };
        for (name, text) in [
            ("CMakeLists.txt", cmake.as_str()),
            ("ggml/CMakeLists.txt", "# nothing here\n"),
            ("tools/server/CMakeLists.txt", "# nothing here\n"),
        ] {
            let path = history.folder.join(name);
            std::fs::create_dir_all(path.parent().context("a file has a folder")?)?;
            std::fs::write(path, text)?;
        }
        history.git(&["init", "--quiet", "--initial-branch", "main"])?;
        for (number, planted) in planted.iter().enumerate() {
            let mut text = server(planted)?;
            // This line makes every commit different.
            let _ = writeln!(text, "/* {number} */");
            std::fs::write(history.folder.join("tools/server/server.c"), text)?;
            history.git(&["add", "--all"])?;
            history.git(&["commit", "--quiet", "--message", &format!("server : change number {number}")])?;
            history.git(&["tag", &format!("b{}", 9000 + number)])?;
        }
        Ok(history)
    }

    fn git(&self, args: &[&str]) -> Result<(), Trouble> {
        let settings =
            ["user.name=t", "user.email=t@example.org", "commit.gpgsign=false", "tag.gpgsign=false"];
        let mut command = Command::new("git");
        command.arg("-C").arg(&self.folder);
        let settings = settings.iter().flat_map(|setting| ["-c", setting]);
        let output = command.args(settings).args(args).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(Trouble::new(format!("git {args:?}: {said}"))) }
    }
}
