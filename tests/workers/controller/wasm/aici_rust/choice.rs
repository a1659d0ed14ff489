//! Each of `forks` sequences samples one of `choices`, votes in variables, and stops.
//!
//! Argument: {"choices":["yes","no"],"forks":2}. The variable `votes` gets
//! each choice, in order. `count` is the number of choices, written by compare and set.

mod abi;

use abi::{Controller, Json, Mid, Pre, Recognizer, TokTrie, Token};

pub struct Choice {
    choices: Vec<String>,
    forks: usize,
    text: Vec<u8>,
    trie: Option<TokTrie>,
}

export!(Choice);

impl Choice {
    fn new(arg: &str) -> Choice {
        let arg = Json::parse(arg.as_bytes());
        Choice {
            choices: arg.get("choices").array().iter().map(|c| c.text().to_string()).collect(),
            forks: arg.get("forks").number(),
            text: vec![],
            trie: None,
        }
    }

    fn chosen(&self) -> bool {
        self.choices.iter().any(|c| c.as_bytes() == self.text)
    }
}

/// The text that was sampled, and the bytes of a token after it.
struct Prefix<'a> {
    choices: &'a [String],
    text: Vec<u8>,
}

impl<'a> Recognizer for Prefix<'a> {
    fn try_push_byte(&mut self, byte: u8) -> bool {
        self.text.push(byte);
        let fits = self.choices.iter().any(|c| c.as_bytes().starts_with(&self.text));
        if !fits {
            self.text.pop();
        }
        fits
    }

    fn pop_bytes(&mut self, count: usize) {
        self.text.truncate(self.text.len() - count);
    }
}

impl Controller for Choice {
    fn init_prompt(&mut self, prompt: Vec<Token>) {
        let trie = TokTrie::read();
        assert_eq!(trie.eos, abi::eos_token());
        println!("prompt of {} tokens; {} tokens in {} nodes", prompt.len(), trie.vocab_size, trie.nodes());
        self.trie = Some(trie);
    }

    fn pre_process(&mut self) -> Pre {
        let forks = std::mem::replace(&mut self.forks, 1);
        Pre::Fork(forks)
    }

    fn mid_process(&mut self, fork_group: Vec<u32>) -> Mid {
        assert!(fork_group.contains(&abi::self_seq_id()));
        let trie = self.trie.as_ref().unwrap();
        let mut prefix = Prefix { choices: &self.choices, text: self.text.clone() };
        let mask = trie.compute_bias(&mut prefix);
        assert_eq!(prefix.text, self.text, "the stack is as it was");
        Mid::Sample(mask)
    }

    fn post_process(&mut self, tokens: Vec<Token>, _backtrack: usize) -> bool {
        for token in tokens {
            self.text.extend_from_slice(self.trie.as_ref().unwrap().token(token));
        }
        if !self.chosen() {
            return false;
        }
        let vote = [&self.text[..], b";"].concat();
        abi::write("votes", &vote, "Append", None).unwrap();
        // The first write names a wrong version, so it returns the current version and value.
        let mut seen = Some((1000, vec![]));
        loop {
            let (version, count) = match &seen {
                Some((version, count)) => (*version, count.first().copied().unwrap_or(0)),
                None => (0, 0),
            };
            match abi::write("count", &[count + 1], "Set", Some(version)) {
                Ok(version) => {
                    println!("{} votes, version {}", count + 1, version);
                    return true;
                }
                Err(there) => seen = there,
            }
        }
    }
}
