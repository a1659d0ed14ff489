//! Forks into two sequences. The first samples, drops tokens, and writes a word to a variable. The
//! second waits for the word and appends it.
//!
//! The argument is the word; "panic" panics in mid_process.

mod abi;

use abi::{Controller, Mid, Pre, Token};

enum Part {
    /// Nothing has happened.
    New,
    /// Samples two tokens, then replaces them.
    Writer { sampled: usize },
    /// Stops in its next pre_process.
    Done,
    Waiter,
}

pub struct Scribe {
    word: String,
    part: Part,
}

export!(Scribe);

impl Scribe {
    fn new(arg: &str) -> Scribe {
        Scribe { word: arg.to_string(), part: Part::New }
    }
}

impl Controller for Scribe {
    fn init_prompt(&mut self, prompt: Vec<Token>) {
        println!("init_prompt {:?}", prompt);
    }

    fn pre_process(&mut self) -> Pre {
        match self.part {
            Part::New => Pre::Fork(2),
            Part::Writer { .. } => Pre::Fork(1),
            Part::Done => Pre::Stop,
            Part::Waiter => match abi::get("word") {
                None => {
                    println!("waiting");
                    Pre::Suspend
                }
                Some((version, word)) => {
                    println!("woken by version {}", version);
                    self.part = Part::Done;
                    let word = String::from_utf8(word).unwrap();
                    Pre::Append(abi::tokenize(&format!(" the answer is {}", word)))
                }
            },
        }
    }

    fn mid_process(&mut self, fork_group: Vec<u32>) -> Mid {
        if self.word == "panic" {
            panic!("no word for {:?}", fork_group);
        }
        if let Part::New = self.part {
            assert_eq!(fork_group.len(), 2);
            let first = fork_group[0] == abi::self_seq_id();
            println!("{} of {:?}", if first { "writer" } else { "waiter" }, fork_group);
            self.part = if first { Part::Writer { sampled: 0 } } else { Part::Waiter };
        }
        match self.part {
            // Drops the two sampled tokens, and the token that would be sampled next.
            Part::Writer { sampled: 2 } => {
                Mid::Splice { backtrack: 3, tokens: abi::tokenize(" not") }
            }
            _ => Mid::SampleAny,
        }
    }

    fn post_process(&mut self, tokens: Vec<Token>, backtrack: usize) -> bool {
        println!("post_process {:?} {}", tokens, backtrack);
        match &mut self.part {
            Part::Writer { sampled: 2 } => {
                assert_eq!(backtrack, 2);
                assert_eq!(tokens, abi::tokenize(" not"));
                abi::write("word", self.word.as_bytes(), "Set", Some(0)).unwrap();
                self.part = Part::Done;
            }
            Part::Writer { sampled } => *sampled += tokens.len(),
            _ => assert_eq!(backtrack, 0),
        }
        false
    }
}
